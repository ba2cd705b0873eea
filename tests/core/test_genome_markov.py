"""Vectorised counts and scores equal those of a dictionary; random and periodic bases score as they must."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.errors import ConfigError, DataError
from isozyme.core.genome import markov
from isozyme.core.genome.markov import MarkovModel, best_markov, entropy
from isozyme.core.genome.split import Region
from isozyme.core.genome.store import Genome

COMPLEMENTS = dict(zip("ACGTN", "TGCAN", strict=True))


def naive_bits(
    text: str, regions: list[tuple[int, int]], labels: list[tuple[int, int, int]], order: int
) -> float:
    """The slow twin: contexts are strings, counted in a dictionary."""
    counts = Counter()  # type: Counter[tuple[str, str]]

    def context(strand: str, at: int, k: int) -> str | None:
        found = strand[max(at - k, 0) : at]
        return found if len(found) == k and set(found) <= set("ACGT") else None

    for start, stop in regions:
        part = text[start:stop]
        for strand in (part, "".join(COMPLEMENTS[c] for c in reversed(part))):
            for at, base in enumerate(strand):
                for k in range(order + 1):
                    found = context(strand, at, k)
                    if base != "N" and found is not None:
                        counts[found, base] += 1
    bits, number = 0.0, 0
    for origin, start, stop in labels:
        for at in range(start, stop):
            if text[at] == "N":
                continue
            longest = next(
                c for k in range(order, -1, -1) if (c := context(text[origin:], at - origin, k)) is not None
            )
            total = sum(counts[longest, base] for base in "ACGT")
            bits -= math.log2((counts[longest, text[at]] + 1) / (total + 4))
            number += 1
    return bits / number


@given(
    text=st.text("ACGTN", min_size=20, max_size=90).filter(lambda t: set(t[10:16]) & set("ACGT")),
    order=st.integers(0, 4),
    chunk=st.integers(1, 9),
)
def test_scores_equal_those_of_a_dictionary(text: str, order: int, chunk: int) -> None:
    genome = Genome.from_sequences({"a": text})
    half = len(text) // 2
    regions = [(0, half), (half + 2, len(text))]
    spans = [(8, 10, 16), (half, half + 1, len(text))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markov, "_CHUNK", chunk)
        model = MarkovModel(order).count(genome, [Region(0, *region) for region in regions])
        score = model.score(genome, [(Region(0, origin, stop), start, stop) for origin, start, stop in spans])
    assert score.bits_per_base == pytest.approx(naive_bits(text, regions, spans, order), abs=1e-9)
    assert score.labels == sum(text[at] != "N" for _, start, stop in spans for at in range(start, stop))


def random_genome(length: int, period: int | None = None) -> Genome:
    rng = np.random.default_rng(0)
    letters = "".join(rng.choice(list("ACGT"), period or length))
    return Genome.from_sequences({"a": (letters * (length // len(letters) + 1))[:length]})


def test_random_bases_cost_two_bits() -> None:
    genome = random_genome(40_000)
    model = best_markov(genome, [Region(0, 0, 30_000)])
    score = model.score(genome, [(Region(0, 30_000, 40_000), 30_001, 40_000)])
    assert model.order <= 3
    assert score.bits_per_base == pytest.approx(2.0, abs=0.01)


def test_a_period_is_found_by_an_order_that_spans_it() -> None:
    genome = random_genome(40_000, period=300)
    model = best_markov(genome, [Region(0, 0, 30_000)])
    assert model.order >= 4
    assert model.score(genome, [(Region(0, 30_000, 40_000), 30_001, 40_000)]).bits_per_base < 0.6


def test_the_choice_of_the_order_does_not_see_what_is_held_out() -> None:
    one, other = random_genome(5000), random_genome(5000)
    changed = "A" * 1000
    other = Genome.from_sequences({"a": one.bases(0, 0, 4000).tobytes().decode() + changed})
    orders = [best_markov(genome, [Region(0, 0, 4000)]) for genome in (one, other)]
    assert orders[0].order == orders[1].order
    assert all((a == b).all() for a, b in zip(orders[0].counts, orders[1].counts, strict=True))


@pytest.mark.parametrize("unknown", [1000, 40_000])
def test_unknown_letters_at_the_end_do_not_hide_the_order(unknown: int) -> None:
    text = random_genome(40_000, period=300).bases(0, 0, 40_000).tobytes().decode()
    genome = Genome.from_sequences({"a": text + "N" * unknown, "b": "N" * unknown})
    model = best_markov(genome, [Region(0, 0, 40_000 + unknown), Region(1, 0, unknown)])
    assert model.order == best_markov(Genome.from_sequences({"a": text}), [Region(0, 0, 40_000)]).order >= 4


@pytest.mark.parametrize("text", ["A", "NNA", "ANNN", "ACGTACGTAN"])
def test_a_part_too_short_to_choose_the_order_on_has_order_0(text: str) -> None:
    assert best_markov(Genome.from_sequences({"a": text}), [Region(0, 0, len(text))]).order == 0


def test_both_strands_count_alike() -> None:
    model = MarkovModel(0).count(Genome.from_sequences({"a": "AAACC"}), [Region(0, 0, 5)])
    assert model.counts[0].tolist() == [3, 2, 2, 3]


def test_entropy_counts_bases_of_all_regions_and_nothing_else() -> None:
    genome = Genome.from_sequences({"a": "AANNRTTTT", "b": "CCCC"})
    assert entropy(genome, [Region(0, 0, 5), Region(1, 2, 4)]) == 1.0
    assert entropy(genome, [Region(0, 0, 2)]) == entropy(genome, [Region(0, 2, 5)]) == 0.0


def test_nothing_to_predict_is_refused() -> None:
    genome = Genome.from_sequences({"a": "ACGTNNNN"})
    with pytest.raises(DataError, match="no A, C, G or T"):
        MarkovModel(2).count(genome, [Region(0, 0, 4)]).score(genome, [(Region(0, 4, 8), 5, 8)])
    with pytest.raises(ConfigError, match=r"data\.markov_order=13"):
        MarkovModel(13)
