"""The training and the held-out part share no base and together hold the whole genome."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isozyme.core.errors import ConfigError
from isozyme.core.genome.split import Region, Split, split_genome, split_tail, total_bases

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=12)
shares = st.floats(0.02, 0.98)


def bases(regions: tuple[Region, ...]) -> list[tuple[int, int]]:
    return [(region.contig, base) for region in regions for base in range(region.start, region.stop)]


def split_or_skip(lengths: list[int], share: float, mode: str) -> Split:
    try:
        return split_genome(lengths, held_out=share, window=2, mode=mode)  # type: ignore[arg-type]
    except ConfigError:
        assume(False)
        raise


@given(lengths=lengths, share=shares, mode=st.sampled_from(["auto", "contig", "tail"]))
def test_parts_are_disjoint_and_hold_everything(lengths: list[int], share: float, mode: str) -> None:
    split = split_or_skip(lengths, share, mode)
    everything = [(contig, base) for contig, length in enumerate(lengths) for base in range(length)]
    assert sorted(bases(split.train) + bases(split.held_out)) == everything
    assert bases(split.train)
    assert bases(split.held_out)
    assert list(split.train) == sorted(split.train)
    assert split.share == pytest.approx(len(bases(split.held_out)) / len(everything))


@given(lengths=lengths, share=shares)
def test_a_tail_is_the_end_of_the_file_to_the_base(lengths: list[int], share: float) -> None:
    split = split_or_skip(lengths, share, "tail")
    assert max(bases(split.train)) < min(bases(split.held_out))
    assert total_bases(split.held_out) == round(share * sum(lengths))


@given(lengths=st.lists(st.integers(3, 300), min_size=2, max_size=12), share=shares)
def test_a_split_by_contig_cuts_none_and_cannot_be_bettered_by_one_more(
    lengths: list[int], share: float
) -> None:
    split = split_genome(lengths, held_out=share, window=2, mode="contig")
    assert all(region.length == lengths[region.contig] for region in split.train + split.held_out)
    target, held = share * sum(lengths), total_bases(split.held_out)
    if len(split.train) > 1 and held <= target:
        assert all(abs(held + region.length - target) >= target - held for region in split.train)


def test_auto_takes_contigs_only_if_they_come_near_the_share() -> None:
    assert split_genome([100], held_out=0.1, window=4).held_out == (Region(0, 90, 100),)
    assert split_genome([100, 10], held_out=0.1, window=4).held_out == (Region(1, 0, 10),)
    for lengths in ([50, 50], [1000, 10]):  # five times the share, a tenth of it
        assert split_genome(lengths, held_out=0.1, window=4) == split_genome(
            lengths, held_out=0.1, window=4, mode="tail"
        )


def test_a_split_says_how_it_was_made() -> None:
    assert split_genome([100, 10], held_out=0.1, window=4, mode="contig").manner == "whole contigs"
    assert split_genome([100, 10], held_out=0.2, window=4, mode="tail").manner == "the tail"


def test_a_genome_shorter_than_a_window_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"held-out part has 10 of 100 bases.*window=10; 10 < 10 \+ 1"):
        split_genome([100], held_out=0.1, window=10)
    split_genome([100], held_out=0.1, window=9)
    with pytest.raises(ConfigError, match=r"training part has 10 of 100 bases"):
        split_genome([100], held_out=0.9, window=10)


def test_a_split_by_contig_needs_two() -> None:
    with pytest.raises(ConfigError, match=r"data\.split=contig, contigs=1"):
        split_genome([100], held_out=0.1, window=4, mode="contig")


def test_a_tail_may_cut_a_region_that_begins_within_a_contig() -> None:
    split = split_tail([Region(0, 5, 15), Region(1, 20, 30)], 0.75)
    assert split == Split((Region(0, 5, 10),), (Region(0, 10, 15), Region(1, 20, 30)))
