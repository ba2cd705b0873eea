"""Windows equal those of a slow twin that writes every document out, on either strand, and never leak."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from isozyme.core.batch import Batch
from isozyme.core.genome.split import Region, split_genome, total_bases
from isozyme.core.genome.store import Genome
from isozyme.core.genome.stream import TokenStream
from isozyme.core.genome.tokens import BOS, EOS, PAD
from isozyme.core.genome.windows import BLANK, HeldOutWindows, Place, WindowSampler, totals_of

COMPLEMENTS = dict(zip("ACGTNRY^$", "TGCANYR^$", strict=True))
WORD = 16
SYMBOLS = {ord("^"): BOS, ord("$"): EOS}


def written_out(genome: Genome, regions: tuple[Region, ...], reverse: bool) -> list[tuple[str, int]]:
    """The slow twin of a stream: (symbol, document), with ^ for BOS and $ for EOS, one strand written out."""
    documents = []
    for region in regions:
        contig = genome.contigs[region.contig]
        text = genome.bases(region.contig, region.start, region.stop).tobytes().decode()
        first, last = region.start == 0, region.stop == contig.length
        if reverse:
            text = "".join(COMPLEMENTS[letter] for letter in reversed(text))
            first, last = last, first
        documents.append("^" * first + text + "$" * last)
    if reverse:
        documents.reverse()
    return [(symbol, number) for number, text in enumerate(documents) for symbol in text]


def expected_window(stream: list[tuple[str, int]], start: int, window: int) -> dict[str, list[int]]:
    """The slow twin of a training window: walks the circle token by token."""
    rows: dict[str, list[int]] = {"tokens": [], "label_valid": [], "positions": [], "documents": []}
    document, position = 0, 0
    for step in range(window):
        symbol, number = stream[(start + step) % len(stream)]
        after, next_number = stream[(start + step + 1) % len(stream)]
        wraps = (start + step + 1) % len(stream) == 0
        rows["tokens"].append(SYMBOLS.get(ord(symbol), ord(symbol)))
        rows["positions"].append(position)
        rows["documents"].append(document)
        goes_on = next_number == number and not wraps
        rows["label_valid"].append(int(goes_on and after in "ACGT"))
        document, position = (document, position + 1) if goes_on else (document + 1, 0)
    return rows


def rows_of(batch: Batch, row: int) -> dict[str, list[int]]:
    names = ("tokens", "label_valid", "positions", "documents")
    return {name: getattr(batch, name)[row].long().tolist() for name in names}


contigs = st.lists(st.text("ACGTNRY", min_size=1, max_size=60), min_size=1, max_size=6)


def genome_of(contigs: list[str]) -> Genome:
    return Genome.from_sequences({f"c{i}": letters for i, letters in enumerate(contigs)})


def held_out_of(contigs: list[str], share: float, window: int) -> HeldOutWindows:
    assume(sum(map(len, contigs)) >= 20)
    genome = genome_of(contigs)
    regions = split_genome(genome.lengths, held_out=share, window=2, mode="tail").held_out
    return HeldOutWindows(TokenStream(genome, regions), window=window)


def sampler_of(
    contigs: list[str], share: float, head: bool, window: int, overlap: int, seed: int
) -> WindowSampler:
    """Windows of the first or of the last part of a genome, if they fit into it."""
    assume(overlap < window and sum(map(len, contigs)) >= 20)
    genome = genome_of(contigs)
    split = split_genome(genome.lengths, held_out=share, window=2, mode="tail")
    part = split.train if head else split.held_out
    assume(total_bases(part) > window)
    return WindowSampler(TokenStream(genome, part), window=window, overlap=overlap, seed=seed)


some_sampler = given(
    contigs=contigs,
    share=st.floats(0.3, 0.6),
    head=st.booleans(),
    window=st.integers(2, 12),
    overlap=st.integers(0, 8),
    seed=st.integers(0, 99),
    number=st.integers(0, 500),
)


@some_sampler
def test_a_window_is_what_the_written_out_strand_says(number: int, **drawn: Any) -> None:
    sampler, index = sampler_of(**drawn), number
    place = sampler.place(index)
    stream = written_out(sampler.stream.genome, sampler.stream.regions, place.reverse)
    start = -(place.offset + sampler.window) if place.reverse else place.offset
    batch = sampler.batch([index])
    expected = expected_window(stream, start, sampler.window)
    assert rows_of(batch, 0) == expected
    valid = batch.label_valid[0]
    following = torch.tensor([*expected["tokens"][1:], -1])
    assert batch.token_valid.all()
    assert (batch.labels[0][:-1][valid[:-1]] == following[:-1][valid[:-1]]).all()
    if valid[-1]:
        assert chr(int(batch.labels[0, -1])) == stream[(start + sampler.window) % len(stream)][0]


@some_sampler
def test_an_epoch_covers_every_token_and_each_window_once(number: int, **drawn: Any) -> None:
    sampler, epoch = sampler_of(**drawn), number % 4
    count = sampler.windows_per_epoch
    places = [sampler.place(index) for index in range(epoch * count, (epoch + 1) * count)]
    assert {place.epoch for place in places} == {epoch}
    assert len({place.offset for place in places}) == count
    seen = {(place.offset + i) % len(sampler.stream) for place in places for i in range(sampler.window)}
    assert seen == set(range(len(sampler.stream)))


@pytest.fixture
def genome() -> Genome:
    """Random bases in four contigs, three of them shorter than the windows of 64."""
    rng = np.random.default_rng(0)
    draw = {f"c{i}": "".join(rng.choice(list("ACGT"), size)) for i, size in enumerate((5000, 40, 7, 30))}
    return Genome.from_sequences(draw)


def whole(genome: Genome) -> TokenStream:
    return TokenStream(genome, [Region(i, 0, length) for i, length in enumerate(genome.lengths)])


def test_a_sample_depends_on_nothing_but_seed_and_index(genome: Genome) -> None:
    one = WindowSampler(whole(genome), window=64, seed=3)
    other = WindowSampler(whole(genome), window=64, seed=3)
    together = one.batch([5, 900, 6])
    other.batch([77])
    assert rows_of(together, 1) == rows_of(other.batch([900]), 0)
    assert rows_of(together, 2) == rows_of(other.batch([6, 5]), 0)
    reseeded = WindowSampler(whole(genome), window=64, seed=4)
    assert [reseeded.place(i) for i in range(20)] != [one.place(i) for i in range(20)]


def test_epochs_differ_in_phase_order_and_strand(genome: Genome) -> None:
    sampler = WindowSampler(whole(genome), window=64)
    count = sampler.windows_per_epoch
    first, second = ([sampler.place(e * count + i) for i in range(count)] for e in range(2))
    assert {place.offset for place in first}.isdisjoint(place.offset for place in second)
    orders = [
        [(place.offset - min(p.offset for p in places)) for place in places] for places in (first, second)
    ]
    assert orders[0] != orders[1]
    assert [place.reverse for place in first] != [place.reverse for place in second]
    phases = {sampler.place(epoch * count).offset % 64 for epoch in range(200)}
    assert len(phases) > 50


def test_both_strands_are_drawn_alike_and_one_strand_on_request(genome: Genome) -> None:
    sampler = WindowSampler(whole(genome), window=64)
    assert 900 < sum(sampler.place(i).reverse for i in range(2000)) < 1100
    forward = WindowSampler(whole(genome), window=64, reverse_complement=False)
    assert not any(forward.place(i).reverse for i in range(200))
    assert [p.offset for p in map(forward.place, range(50))] == [
        p.offset for p in map(sampler.place, range(50))
    ]


def test_short_contigs_are_packed_with_boundaries(genome: Genome) -> None:
    tokens, documents = whole(genome).read(5002, 42 + 9 + 32)
    assert documents.tolist() == [0] * 42 + [1] * 9 + [2] * 32
    assert [int(i) for i in np.flatnonzero(tokens == BOS)] == [0, 42, 51]
    assert [int(i) for i in np.flatnonzero(tokens == EOS)] == [41, 50, 82]
    sampler = WindowSampler(
        TokenStream(genome, [Region(i, 0, n) for i, n in enumerate(genome.lengths)][1:]), window=64
    )
    batch = sampler.batch(range(20))
    assert batch.documents.max(dim=1).values.unique().tolist() == [1, 2, 3]
    boundary = batch.documents.diff(dim=1) != 0
    assert not batch.label_valid[:, :-1][boundary].any()
    assert (batch.positions[:, 1:][boundary] == 0).all()
    assert (batch.positions[:, 1:][~boundary] == batch.positions[:, :-1][~boundary] + 1).all()


def words_of(text: str) -> set[str]:
    return {text[i : i + WORD] for i in range(len(text) - WORD + 1)}


def other_strand(words: set[str]) -> set[str]:
    return {"".join(COMPLEMENTS[letter] for letter in reversed(word)) for word in words}


def words_of_windows(batch: Batch) -> set[str]:
    """All words of bases within one document, the last label included."""
    found: set[str] = set()
    for row in range(batch.num_windows):
        text, documents = "", batch.documents[row].tolist()
        for at, token in enumerate(batch.tokens[row].tolist()):
            text += "." if at and documents[at] != documents[at - 1] else ""
            text += chr(token) if token > 3 else "."
        text += chr(int(batch.labels[row, -1])) if batch.label_valid[row, -1] else ""
        found |= {word for part in text.split(".") for word in words_of(part)}
    return found


def test_training_windows_hold_every_training_word_on_both_strands_and_no_held_out_one() -> None:
    """Words of 16 random bases occur once in a genome of 3,000, so that a leak has a name."""
    letters = "".join(np.random.default_rng(1).choice(list("ACGT"), 3000))
    genome = Genome.from_sequences({"a": letters})
    split = split_genome(genome.lengths, held_out=0.2, window=50)
    sampler = WindowSampler(TokenStream(genome, split.train), window=50, overlap=20)
    found = words_of_windows(sampler.batch(range(20 * sampler.windows_per_epoch)))
    train, held_out = words_of(letters[:2400]), words_of(letters[2400 - WORD + 1 :])
    assert found == train | other_strand(train)
    assert found.isdisjoint(held_out | other_strand(held_out))
    tiles = HeldOutWindows(TokenStream(genome, split.held_out), window=50)
    assert words_of_windows(tiles.batch(range(len(tiles)))) <= words_of(letters[2400:])


@given(contigs=contigs, window=st.integers(2, 20), share=st.floats(0.2, 0.8))
def test_held_out_labels_are_each_base_that_something_precedes_once(
    contigs: list[str], window: int, share: float
) -> None:
    held_out = held_out_of(contigs, share, window)
    genome, regions = held_out.stream.genome, held_out.stream.regions
    batch = held_out.batch(range(len(held_out)))
    labels = bytes(batch.labels[batch.label_valid].tolist())
    texts = [genome.bases(r.contig, r.start, r.stop).tobytes()[int(r.start > 0) :] for r in regions]
    assert labels == bytes(letter for text in texts for letter in text if letter in b"ACGT")
    padding = len(held_out) * window - len(held_out.stream)
    assert 0 <= padding < window
    assert int((~batch.token_valid).sum()) == padding
    assert (batch.tokens[~batch.token_valid] == PAD).all()
    assert not batch.label_valid[~batch.token_valid].any()


@given(contigs=contigs, window=st.integers(2, 20), data=st.data())
def test_label_regions_are_exactly_the_labels_of_the_windows(
    contigs: list[str], window: int, data: st.DataObject
) -> None:
    held_out = held_out_of(contigs, 0.5, window)
    genome, regions = held_out.stream.genome, held_out.stream.regions
    chosen = sorted(data.draw(st.sets(st.integers(0, len(held_out) - 1))))
    batch = held_out.batch([*chosen, BLANK])
    labels = bytes(batch.labels[batch.label_valid].tolist())
    found = held_out.label_regions([*chosen, BLANK])
    spans = [genome.bases(region.contig, start, stop).tobytes() for region, start, stop in found]
    assert labels == bytes(letter for span in spans for letter in span if letter in b"ACGT")
    assert all(region.start <= start < stop <= region.stop for region, start, stop in found)
    everything = held_out.label_regions()
    assert len(everything) <= len(regions)


def test_a_blank_window_is_padding_alone(genome: Genome) -> None:
    held_out = HeldOutWindows(whole(genome), window=64)
    batch = held_out.batch([0, BLANK])
    assert batch.token_valid.any(dim=1).tolist() == [True, False]
    assert not batch.label_valid[1].any()
    assert batch.positions[1].tolist() == list(range(64))
    totals = totals_of([batch])
    assert (totals.windows, totals.real_tokens) == (1, 64)
    assert totals.valid_labels == 64


def test_padding_is_a_document_of_its_own(genome: Genome) -> None:
    held_out = HeldOutWindows(whole(genome), window=64)
    batch = held_out.batch([len(held_out) - 1])
    real, padded = batch.documents[batch.token_valid], batch.documents[~batch.token_valid]
    assert padded.numel() > 0
    assert set(padded.tolist()) == {int(real.max()) + 1}


def test_totals_of_a_step_are_those_of_its_batches(genome: Genome) -> None:
    sampler = WindowSampler(whole(genome), window=64)
    indices = range(80)
    totals = sampler.totals(indices)
    assert totals == totals_of([sampler.batch(indices[:30]), sampler.batch(indices[30:])])
    assert (totals.windows, totals.real_tokens) == (80, 80 * 64)
    assert totals.valid_labels < totals.real_tokens
    several = [len(set(sampler.batch([index]).documents[0].tolist())) > 1 for index in indices]
    assert totals.packed_windows == sum(several) > 0


def test_the_place_says_what_the_window_covers(genome: Genome) -> None:
    sampler = WindowSampler(whole(genome), window=64, seed=2)
    index = next(i for i in range(50) if not sampler.place(i).reverse and 1 <= sampler.place(i).offset < 4900)
    offset = sampler.place(index).offset
    assert sampler.place(index) == Place(0, offset, False)
    batch = sampler.batch([index])
    assert bytes(batch.tokens[0].tolist()) == genome.bases(0, offset - 1, offset + 63).tobytes()
    assert bytes(batch.labels[0].tolist()) == genome.bases(0, offset, offset + 64).tobytes()


def test_only_a_batch_with_a_boundary_says_that_it_is_packed(genome: Genome) -> None:
    sampler = WindowSampler(whole(genome), window=64)
    said = [sampler.batch([i]).packed for i in range(60)]
    assert said == [bool(sampler.batch([i]).documents.any()) for i in range(60)]
    assert 0 < sum(said) < 60
