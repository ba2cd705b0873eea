"""The genome data of a run in one object: the genome, its split, its windows and its Markov baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from isozyme.core.batch import Batch
from isozyme.core.config import DataConfig
from isozyme.core.errors import DataError
from isozyme.core.genome.markov import MarkovScore, best_markov
from isozyme.core.genome.split import Region, Split, split_genome, total_bases
from isozyme.core.genome.store import Genome
from isozyme.core.genome.stream import TokenStream
from isozyme.core.genome.tokens import is_base
from isozyme.core.genome.windows import HeldOutWindows, WindowSampler

_BLOCK: Final = 1 << 20


@dataclass(frozen=True, eq=False)
class GenomeData:
    """What a trainer needs of a genome; the same on every rank."""

    config: DataConfig
    genome: Genome
    split: Split
    train: WindowSampler
    held_out: HeldOutWindows

    @staticmethod
    def open(config: DataConfig, *, seed: int, cache: str | Path) -> GenomeData:
        """Open the genome of a configuration, tokenising it into `cache` if need be.

        Safe on all ranks at once; where many share a slow disk, let one call it first.

        Raises:
            DataError: the FASTA file is missing or malformed.
            ConfigError: the genome is too short for the window, or the cache cannot be written.
        """
        return GenomeData.of(Genome.open(config.fasta, cache), config, seed=seed)

    @staticmethod
    def of(genome: Genome, config: DataConfig, *, seed: int) -> GenomeData:
        """The same for a genome that is open already."""
        split = split_genome(
            genome.lengths, held_out=config.held_out, window=config.window, mode=config.split
        )
        train = WindowSampler(
            TokenStream(genome, split.train),
            window=config.window,
            overlap=config.overlap,
            seed=seed,
            reverse_complement=config.reverse_complement,
        )
        for name, part in (("training", split.train), ("held-out", split.held_out)):
            must_hold_bases(genome, part, f"the {name} part")
        held_out = HeldOutWindows(TokenStream(genome, split.held_out), window=config.window)
        return GenomeData(config, genome, split, train, held_out)

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """The training windows of some global sample indices."""
        return self.train.batch(indices)

    def held_out_batch(self, indices: Sequence[int]) -> Batch:
        """Some held-out windows; the index `BLANK` gives padding alone."""
        return self.held_out.batch(indices)

    def markov(self, indices: Iterable[int] | None = None) -> MarkovScore:
        """The Markov baseline on exactly the labels of these held-out windows (of all if null)."""
        model = best_markov(self.genome, self.split.train, self.config.markov_order)
        return model.score(self.genome, self.held_out.label_regions(indices))


def must_hold_bases(genome: Genome, part: Sequence[Region], name: str) -> None:
    """Refuse a part of a genome that is unknown from end to end; reads no further than the first base.

    Raises:
        DataError: no letter of the part is A, C, G or T, so that there is nothing to learn or to predict.
    """
    blocks = (
        genome.bases(region.contig, start, min(start + _BLOCK, region.stop))
        for region in part
        for start in range(region.start, region.stop, _BLOCK)
    )
    if not any(is_base(block).any() for block in blocks):
        raise DataError(
            f"a genome must hold known bases: data.fasta={genome.source}; {name} has "
            f"{total_bases(part):,} letters, and none of them is A, C, G or T. Give another file, or change "
            "data.held_out or data.split."
        )
