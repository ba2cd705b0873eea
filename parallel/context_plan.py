"""Where a call of context-parallel attention stands: its group, its layout, its documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isozyme.core.context import KernelName
from isozyme.parallel.attention_kernels import fitting
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.context_layout import ContextLayout, Segment
from isozyme.parallel.context_tiles import Documents, Tile, tiles


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """What all layers of a micro-batch share."""

    comm: Communicator
    """The CP group."""
    layout: ContextLayout
    documents: Documents
    packed: bool = True
    """Whether a window may hold several documents."""
    kernel: KernelName = "torch"
    """What computes whole windows, and what tiles prefer."""

    @property
    def tile_kernel(self) -> KernelName:
        """What computes tiles: not cuDNN if documents make ever new shapes."""
        if self.packed and self.kernel == "cudnn":
            return "flash"
        return fitting(self.kernel, min(part.length for part in self.layout.segments(self.comm.rank)))

    @property
    def whole(self) -> tuple[Segment, ...]:
        """The whole window in its own order."""
        return (Segment(place=0, offset=0, length=self.layout.window),)

    def tiles_with_whole(self) -> Iterator[Tile]:
        """This rank's queries against the keys of the whole window."""
        return tiles(self.layout.segments(self.comm.rank), self.whole, self.documents)

    def tiles_with(self, rank: int) -> Iterator[Tile]:
        """This rank's queries against the keys of `rank`."""
        return tiles(self.layout.segments(self.comm.rank), self.layout.segments(rank), self.documents)

    def tiles_of_whole(self) -> Iterator[Tile]:
        """All queries against all keys of the window."""
        return tiles(self.whole, self.whole, self.documents)
