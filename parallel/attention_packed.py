"""Causal attention inside the packed documents of whole windows, without a mask.

`VariableLength` is one FlashAttention call for all documents, `Tiled` is exact arithmetic tile by tile on any
device and in any dtype. Neither makes a tensor of S x S elements, nor spends work on pairs that do not see
each other. The slow twin of both is `isozyme.parallel.context.whole_window_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int32
from torch import Tensor

from isozyme.parallel.attention_kernels import AttentionFacts, kernel_problems
from isozyme.parallel.context_layout import Segment
from isozyme.parallel.context_partial import PartialAttention, PartialGradients, attention_in_parts
from isozyme.parallel.context_tiles import Documents, Tile, tiles

Lengths = Sequence[Sequence[int]]
"""Lengths of the documents of each window, in order; those of one window sum to S."""


@dataclass(frozen=True, eq=False)
class VariableLength:
    """Documents one after the other, for kernels that take them so."""

    starts: Int32[Tensor, "C"]
    """Where each document begins among the B x S tokens, and B x S; on the device of the queries."""
    longest: int
    function: Callable[..., Any]
    """`(q, k, v, starts, starts, longest, longest, grouped heads) → out`: torch's `varlen_attn`, causal."""

    @staticmethod
    def of(lengths: Lengths, device: torch.device) -> VariableLength:
        """From lengths on the host. The device is sent one small tensor, and not waited for."""
        flat = list(chain.from_iterable(lengths))
        starts = torch.tensor(list(accumulate(flat, initial=0)), dtype=torch.int32)
        if device.type == "cuda":
            starts = starts.pin_memory()
        return VariableLength(starts.to(device, non_blocking=True), max(flat), _varlen_attn())

    def __call__(
        self, q: Float[Tensor, "B S N D"], k: Float[Tensor, "B S M D"], v: Float[Tensor, "B S M D"]
    ) -> Float[Tensor, "B S N D"]:
        """As `isozyme.parallel.attention_kernels.attend`, within documents."""
        windows = q.shape[0]
        rows = [rearrange(x, "b s n d -> (b s) n d") for x in (q, k, v)]
        spans = (self.starts, self.starts, self.longest, self.longest)
        out: Tensor = self.function(*rows, *spans, q.shape[2] != k.shape[2])
        return rearrange(out, "(b s) n d -> b s n d", b=windows)


@cache
def _varlen_attn() -> Callable[..., Any]:
    """torch's function, causal: `(q, k, v, starts, starts, longest, longest, grouped heads) → out`.

    It is imported late, as the compiler comes with it, which takes seconds.
    """
    from torch.nn.attention.varlen import varlen_attn

    # Grouped heads must be asked for from torch 2.12 on. Before, they are taken as they come.
    asks = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def causal(*tensors_and_lengths: Any) -> Any:
        *given, grouped = tensors_and_lengths
        more = {"enable_gqa": grouped} if asks else {}
        return varlen_attn(*given, window_size=(-1, 0), **more)

    return causal


@dataclass(frozen=True, eq=False)
class Tiled:
    """Documents as tiles of the whole windows."""

    tiles: tuple[Tile, ...]

    @staticmethod
    def of(lengths: Lengths, window: int) -> Tiled:
        """From lengths on the host.

        Args:
            lengths: of the documents.
            window: S, tokens of a window.
        """
        whole = (Segment(place=0, offset=0, length=window),)
        return Tiled(tuple(tiles(whole, whole, Documents.of_lengths(lengths))))

    def __call__(
        self, q: Float[Tensor, "B S N D"], k: Float[Tensor, "B S M D"], v: Float[Tensor, "B S M D"]
    ) -> Float[Tensor, "B S N D"]:
        """As `isozyme.parallel.attention_kernels.attend`, within documents."""
        return tiled_attention(q, k, v, self.tiles)


Packed = VariableLength | Tiled


def packed_attention(lengths: Lengths, window: int, facts: AttentionFacts, device: torch.device) -> Packed:
    """Attention inside these documents, by FlashAttention where it runs and there are any, else by tiles.

    Args:
        lengths: of the documents.
        window: S, tokens of a window.
        facts: of this rank.
        device: where the queries are.
    """
    if not any(lengths) or kernel_problems("flash", facts):
        return Tiled.of(lengths, window)
    return VariableLength.of(lengths, device)


def tiled_attention(
    q: Float[Tensor, "B S N D"],
    k: Float[Tensor, "B S M D"],
    v: Float[Tensor, "B S M D"],
    plan: Sequence[Tile],
) -> Float[Tensor, "B S N D"]:
    """Attention of the pairs that the tiles name, each of them once.

    Memory: at most 2^24 logits at once, where a kernel holds any. Saved are q, k, v, the output and one
    number a query and head.
    """
    return attention_in_parts(q, k, v, _Local(plan))


@dataclass(frozen=True, eq=False)
class _Local:
    """The keys that are here, and no others."""

    tiles: Sequence[Tile]

    def attend(self, partial: PartialAttention, k: Tensor, v: Tensor) -> None:
        partial.add(k, v, self.tiles)

    def gradients(self, grads: PartialGradients, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        of_k, of_v = (torch.zeros(x.shape, dtype=grads.q.dtype, device=x.device) for x in (k, v))
        grads.add(k, v, of_k, of_v, self.tiles)
        return of_k, of_v
