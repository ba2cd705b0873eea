"""The baseline that a genome model has to beat: an order-k Markov model, in bits per base.

Bases are predicted from the k bases before them by counts over the training regions, both strands, with a
pseudo-count. Where fewer than k bases precede (at the start of a region, or after a letter that is not A, C,
G or T) the model of that lower order predicts. So a model of order k holds the tables of all orders up to k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int64, UInt8

from isozyme.core.errors import ConfigError, DataError
from isozyme.core.genome.split import Region, split_tail
from isozyme.core.genome.store import Genome
from isozyme.core.genome.tokens import BASE_INDEX, NO_BASE, reverse_complement

MAX_ORDER: Final = 12
_AUTO_ORDERS: Final = range(9)
_TAIL: Final = 0.1
_CHUNK: Final = 1 << 22

LabelRegion = tuple[Region, int, int]
"""A region and the bases [start, stop) in it, counted in the contig, that are to be predicted."""


@dataclass(frozen=True)
class MarkovScore:
    """How well a Markov model predicts some bases."""

    order: int
    bits_per_base: float
    labels: int
    """The bases predicted: those of the labels that are A, C, G or T."""


class MarkovModel:
    """Counts of what follows each context of 0 … `order` bases."""

    def __init__(self, order: int, pseudo_count: float = 1.0) -> None:
        if not 0 <= order <= MAX_ORDER:
            raise ConfigError(
                f"the order must be between 0 and {MAX_ORDER}: data.markov_order={order}. Choose a lower one."
            )
        self.order = order
        self.pseudo_count = pseudo_count
        self.counts: list[Int64[np.ndarray, " contexts_times_4"]] = [
            np.zeros(4 ** (k + 1), dtype=np.int64) for k in range(order + 1)
        ]
        """Per order k, how often base b followed context c, at index 4 c + b; the latest base of c is its
        lowest digit."""

    def count(self, genome: Genome, regions: Iterable[Region]) -> MarkovModel:
        """Add the bases of some regions, on both strands; returns the model itself."""
        for region in regions:
            bases = genome.bases(region.contig, region.start, region.stop)
            chunk = max(_CHUNK, 4 ** (self.order + 1))
            for strand in (bases, reverse_complement(bases)):
                for codes, context in _codes(strand, 0, strand.size, self.order, chunk):
                    for k, table in enumerate(self.counts):
                        table += np.bincount(codes[context >= k] % table.size, minlength=table.size)
        return self

    def score(self, genome: Genome, labels: Iterable[LabelRegion], order: int | None = None) -> MarkovScore:
        """Bits per base over `labels`, by the tables up to `order` (all of them if null).

        Raises:
            DataError: there is no A, C, G or T to predict.
        """
        order = self.order if order is None else order
        bits = [self._bits(k) for k in range(order + 1)]
        total, count = 0.0, 0
        for region, start, stop in labels:
            bases = genome.bases(region.contig, region.start, region.stop)
            for codes, context in _codes(bases, start - region.start, stop - region.start, order, _CHUNK):
                for k, table in enumerate(bits):
                    chosen = codes[context >= k if k == order else context == k]
                    total += float(table[chosen % table.size].sum())
                    count += chosen.size
        if count == 0:
            raise DataError(
                f"the held-out part has nothing to predict: {genome.source} holds no A, C, G or T there. "
                "Choose another data.held_out or data.split."
            )
        return MarkovScore(order, total / count, count)

    def _bits(self, k: int) -> np.ndarray:
        """-log2 of the probability of each base after each context of k bases."""
        smoothed = self.counts[k].reshape(-1, 4) + self.pseudo_count
        return -np.log2(smoothed / smoothed.sum(axis=1, keepdims=True)).reshape(-1)


def entropy(genome: Genome, regions: Iterable[Region]) -> float:
    """Shannon's entropy of the base frequencies of some regions, in bits per base; 0 if they hold no base.

    >>> genome = Genome.from_sequences({"a": "AAAACCGT"})
    >>> entropy(genome, [Region(0, 0, 8)])
    1.75
    """
    counts = np.zeros(4, dtype=np.int64)
    for region in regions:
        bases = BASE_INDEX[genome.bases(region.contig, region.start, region.stop)]
        counts += np.bincount(bases, minlength=NO_BASE + 1)[:NO_BASE]
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(shares * np.log2(shares)).sum())


def best_markov(genome: Genome, train: Sequence[Region], order: int | None = None) -> MarkovModel:
    """The Markov model of a training part; the order is chosen without a look at the held-out part.

    If `order` is null, each of 0..8 is counted on the first 90 % of the training part and scored on its last
    10 %, up to the last known base; the best one (the lowest on a tie) is then counted on the whole. Where
    that leaves no base to score, as in a part of a few letters, it is 0.
    """
    if order is None:
        inner = split_tail(_up_to_last_base(genome, train), _TAIL)
        model = MarkovModel(max(_AUTO_ORDERS)).count(genome, inner.train)
        labels = [(region, region.start + 1, region.stop) for region in inner.held_out]
        known = any(_known(genome, each.contig, first, stop).size for each, first, stop in labels)
        scores = [model.score(genome, labels, k) for k in (_AUTO_ORDERS if known else ())]
        order = min(scores, key=lambda score: score.bits_per_base).order if known else 0
    return MarkovModel(order).count(genome, train)


def _up_to_last_base(genome: Genome, regions: Sequence[Region]) -> list[Region]:
    """The regions without what follows their last A, C, G or T: genomes may end in unknown letters."""
    for number, region in reversed(list(enumerate(regions))):
        for stop in range(region.stop, region.start, -_CHUNK):
            known = _known(genome, region.contig, max(stop - _CHUNK, region.start), stop)
            if known.size:
                return [*regions[:number], Region(region.contig, region.start, int(known[-1]) + 1)]
    return []


def _known(genome: Genome, contig: int, start: int, stop: int) -> Int64[np.ndarray, " n"]:
    """Where in a contig's [start, stop) the bases are."""
    return start + np.flatnonzero(BASE_INDEX[genome.bases(contig, start, stop)] != NO_BASE)


def _codes(
    tokens: UInt8[np.ndarray, " N"], start: int, stop: int, order: int, chunk: int
) -> Iterator[tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]]:
    """For the bases among tokens [start, stop), chunk by chunk: a code and the length of the context.

    The code's base-4 digits are, from the lowest, the base itself, the one before it, … `order` bases back;
    digits beyond the context mean nothing. The context is the number of bases in an unbroken row before it,
    at most `order`.
    """
    for begin in range(start, stop, chunk):
        first = max(begin - order, 0)
        base = BASE_INDEX[tokens[first : min(begin + chunk, stop)]].astype(np.int64)
        index = np.arange(base.size)
        last_gap = np.maximum.accumulate(np.where(base == NO_BASE, index, -1))
        context = np.minimum(index - 1 - np.concatenate(([-1], last_gap[:-1])), order)
        codes = base.copy()
        for back in range(1, order + 1):
            codes[back:] += (base[:-back] % NO_BASE) << (2 * back)
        keep = base != NO_BASE
        keep[: begin - first] = False
        yield codes[keep], context[keep]
