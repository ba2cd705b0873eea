"""Regions of a genome as one virtual sequence of tokens, cut nowhere and stored nowhere.

Each region is one document: BOS before it if it begins where its contig begins, its bases, EOS after it if it
ends where its contig ends. (Ends in the middle of a contig are no true ends; a circular molecule is given
where the file cuts it, which counts as its ends.) The documents stand one after another, and the last is
followed by the first: a window that crosses their boundaries is packed from several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt8

from isozyme.core.genome.split import Region
from isozyme.core.genome.store import Genome
from isozyme.core.genome.tokens import BOS, EOS


class TokenStream:
    """The documents of some regions, laid end to end."""

    def __init__(self, genome: Genome, regions: Sequence[Region]) -> None:
        self.genome = genome
        self.regions = tuple(regions)
        self.has_bos = [region.start == 0 for region in self.regions]
        self.has_eos = [region.stop == genome.contigs[region.contig].length for region in self.regions]
        sizes = [
            bos + region.length + eos
            for region, bos, eos in zip(self.regions, self.has_bos, self.has_eos, strict=True)
        ]
        self.starts = np.cumsum([0, *sizes], dtype=np.int64)
        """Where each document begins, and the length of the whole at the end."""

    def __len__(self) -> int:
        """Tokens of all documents, BOS and EOS included."""
        return int(self.starts[-1])

    def read(self, start: int, length: int) -> tuple[UInt8[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
        """The tokens [start, start + length), the stream taken as a circle, and the document of each.

        Documents are counted by the boundaries crossed since `start`: one that is read twice has two numbers.
        """
        tokens = np.empty(length, dtype=np.uint8)
        documents = np.empty(length, dtype=np.int64)
        at = start % len(self)
        document = int(np.searchsorted(self.starts, at, side="right")) - 1
        done = crossed = 0
        while done < length:
            begin = int(self.starts[document])
            size = min(int(self.starts[document + 1]) - at, length - done)
            self._copy(document, at - begin, tokens[done : done + size])
            documents[done : done + size] = crossed
            done, crossed = done + size, crossed + 1
            document = (document + 1) % len(self.regions)
            at = int(self.starts[document])
        return tokens, documents

    def _copy(self, document: int, start: int, out: UInt8[np.ndarray, " N"]) -> None:
        """Write the tokens of one document from its `start`-th on."""
        region, bos = self.regions[document], int(self.has_bos[document])
        first, last = start - bos, start - bos + out.size
        head, tail = int(first < 0), int(last > region.length)
        if head:
            out[0] = BOS
        if tail:
            out[-1] = EOS
        out[head : out.size - tail] = self.genome.bases(
            region.contig, region.start + first + head, region.start + last - tail
        )
