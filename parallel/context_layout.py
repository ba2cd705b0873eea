"""Which tokens of a window each context-parallel rank holds.

A causal query at place p sees p + 1 keys, so equal contiguous shares are unequal work: the last of many ranks
has twice the mean. In the zig-zag order the window is cut into 2 x size chunks and rank r holds chunks r and
2 x size - 1 - r, which is the same work for every rank. On the imbalance: Brandon et al. 2023, "Striped
Attention", arXiv:2311.09431. The pairing of chunks is that of Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from isozyme.core.batch import Batch
from isozyme.core.context import ContextOrder, window_problems
from isozyme.core.errors import Rules


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens that stand next to each other both in the window and in some local tensor."""

    place: int
    """Place of the first one in the whole window."""
    offset: int
    """Its index in the local tensor."""
    length: int


@dataclass(frozen=True, kw_only=True)
class ContextLayout:
    """The tokens of one window over `size` ranks. With one rank, that rank holds the window as it is.

    Args:
        window: S, tokens of a whole window, padding included.
        size: number of context-parallel ranks.
        order: how the window is dealt out.

    Raises:
        ConfigError: if the window cannot be cut so.

    >>> ContextLayout(window=8, size=2).places(0).tolist()
    [0, 1, 6, 7]
    >>> ContextLayout(window=8, size=2, order="contiguous").places(1).tolist()
    [4, 5, 6, 7]
    """

    window: int
    size: int
    order: ContextOrder = "zigzag"

    def __post_init__(self) -> None:
        rules = Rules("context layout")
        rules.extend(window_problems(self.window, self.size, self.order))
        rules.raise_if_broken()

    @property
    def local_length(self) -> int:
        """S / size, tokens that each rank holds of a window."""
        return self.window // self.size

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The runs of tokens that `rank` holds, in the order in which it holds them."""
        length = self.local_length
        if self.size == 1 or self.order == "contiguous":
            return (Segment(place=rank * length, offset=0, length=length),)
        half = length // 2
        return (
            Segment(place=rank * half, offset=0, length=half),
            Segment(place=(2 * self.size - 1 - rank) * half, offset=half, length=half),
        )

    def places(self, rank: int, device: torch.device | str = "cpu") -> Int[Tensor, "L"]:
        """The place in the whole window of each token of `rank`."""
        runs = self.segments(rank)
        return torch.cat([torch.arange(s.place, s.place + s.length, device=device) for s in runs])

    def part(self, x: Shaped[Tensor, "..."], rank: int, dim: int = 1) -> Shaped[Tensor, "..."]:
        """The tokens of `rank` from a whole window, which lies along `dim`."""
        return torch.cat([x.narrow(dim, s.place, s.length) for s in self.segments(rank)], dim)

    def restore(self, x: Shaped[Tensor, "..."], dim: int = 1) -> Shaped[Tensor, "..."]:
        """A whole window in its own order from the parts of all ranks one after the other (an all-gather)."""
        runs = [
            (segment.place, rank * self.local_length + segment.offset, segment.length)
            for rank in range(self.size)
            for segment in self.segments(rank)
        ]
        return torch.cat([x.narrow(dim, start, length) for _, start, length in sorted(runs)], dim)

    def deal(self, x: Shaped[Tensor, "..."], dim: int = 1) -> Shaped[Tensor, "..."]:
        """The parts of all ranks one after the other from a whole window: the inverse of `restore`."""
        return torch.cat([self.part(x, rank, dim) for rank in range(self.size)], dim)

    def part_of_batch(self, batch: Batch, rank: int) -> Batch:
        """The tokens of `rank` with their labels, masks, positions and documents."""
        if self.size == 1:
            return batch
        parts: dict[str, Any] = {
            field.name: self.part(value, rank)
            for field in fields(batch)
            if isinstance(value := getattr(batch, field.name), Tensor)
        }
        return replace(batch, **parts)
