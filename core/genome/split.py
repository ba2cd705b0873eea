"""Which stretches of a genome train, and which are held out: whole contigs, or the tail of the sequence.

A region has no strand: both strands of a stretch are always on the same side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isozyme.core.errors import ConfigError


@dataclass(frozen=True, order=True)
class Region:
    """The bases [start, stop) of one contig, given by its number in the genome."""

    contig: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of bases."""
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """Regions in file order; the two parts share no base and together hold the whole genome."""

    train: tuple[Region, ...]
    held_out: tuple[Region, ...]

    @property
    def share(self) -> float:
        """The share of the bases that is held out in fact."""
        held_out, train = total_bases(self.held_out), total_bases(self.train)
        return held_out / (held_out + train)

    @property
    def manner(self) -> str:
        """How the genome was divided, in words."""
        cut = {region.contig for region in self.train} & {region.contig for region in self.held_out}
        return "the tail" if cut else "whole contigs"


def total_bases(regions: Sequence[Region]) -> int:
    """Bases of several regions together."""
    return sum(region.length for region in regions)


def split_genome(
    lengths: Sequence[int], *, held_out: float, window: int, mode: Literal["auto", "contig", "tail"] = "auto"
) -> Split:
    """Divide a genome into a training and a held-out part.

    `contig` holds out whole contigs, by length alone and so always the same ones: the longest that fits into
    the share, then the longest that fits into the rest, and so on; the shortest one left is added if that
    comes nearer to the share, or if none fitted. `tail` holds out the last bases in file order, through the
    middle of a contig if need be. `auto` is `contig` if that holds out between half and twice the share, else
    `tail`: a chromosome with a small plasmid would hold out the plasmid alone.

    Args:
        lengths: bases of each contig, in file order.
        held_out: share of the bases to hold out, between 0 and 1.
        window: S; each part must hold at least one window with its last label, S + 1 bases.
        mode: how to divide.

    Raises:
        ConfigError: a part is shorter than a window, or `contig` with a single contig.

    >>> split_genome([50, 20, 10], held_out=0.2, window=4).held_out
    (Region(contig=2, start=0, stop=10),)
    >>> split_genome([50], held_out=0.2, window=4).held_out
    (Region(contig=0, start=40, stop=50),)
    """
    if mode == "contig" and len(lengths) < 2:
        raise ConfigError(
            f"a split by contig needs at least 2 contigs: data.split=contig, contigs={len(lengths)}. "
            "Set data.split=tail."
        )
    split = split_tail(_whole(lengths), held_out)
    if len(lengths) > 1 and mode != "tail":
        by_contig = _by_contig(lengths, held_out)
        if mode == "contig" or held_out / 2 <= by_contig.share <= held_out * 2:
            split = by_contig
    for name, part in (("training", split.train), ("held-out", split.held_out)):
        bases = total_bases(part)
        if bases < window + 1:
            raise ConfigError(
                f"each part of the genome must hold a window and the base after it: the {name} part has "
                f"{bases:,} of {sum(lengths):,} bases with data.held_out={held_out}, data.window={window}; "
                f"{bases:,} < {window:,} + 1. Lower data.window, choose another data.held_out or data.split, "
                "or give a longer genome."
            )
    return split


def split_tail(regions: Sequence[Region], share: float) -> Split:
    """Hold out the last bases of several regions in their order, rounded to whole bases."""
    wanted = round(share * total_bases(regions))
    train: list[Region] = []
    held_out: list[Region] = []
    for region in reversed(regions):
        cut = region.stop - min(wanted, region.length)
        wanted -= region.stop - cut
        if cut < region.stop:
            held_out.append(Region(region.contig, cut, region.stop))
        if region.start < cut:
            train.append(Region(region.contig, region.start, cut))
    return Split(tuple(reversed(train)), tuple(reversed(held_out)))


def _whole(lengths: Sequence[int]) -> list[Region]:
    """Every contig from end to end."""
    return [Region(contig, 0, length) for contig, length in enumerate(lengths)]


def _by_contig(lengths: Sequence[int], share: float) -> Split:
    """Hold out whole contigs whose sum is near the share; at least one is held out and one is left."""
    target = share * sum(lengths)
    chosen: set[int] = set()
    taken = 0
    for contig in sorted(range(len(lengths)), key=lambda c: (-lengths[c], c)):
        if taken + lengths[contig] <= target:
            chosen.add(contig)
            taken += lengths[contig]
    left = [contig for contig in range(len(lengths)) if contig not in chosen]
    shortest = min(left, key=lambda c: (lengths[c], c))
    nearer = taken + lengths[shortest] - target < target - taken
    if not chosen or (nearer and len(left) > 1):
        chosen.add(shortest)
    regions = _whole(lengths)
    return Split(
        tuple(region for region in regions if region.contig not in chosen),
        tuple(region for region in regions if region.contig in chosen),
    )
