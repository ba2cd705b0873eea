"""How attention is computed, and how it sees a window of which each context-parallel rank holds a part.

Pure arithmetic on the configuration; the attention itself is in `isozyme.parallel.attention_kernels` for one
rank, and in `isozyme.parallel.context` for several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isozyme.core.errors import Rules, divisors

ContextMethod = Literal["allgather", "ring", "ulysses"]
ContextOrder = Literal["zigzag", "contiguous"]
KernelName = Literal["torch", "cudnn", "flash"]
AttentionKernel = Literal["auto", "torch", "cudnn", "flash"]


CUDNN_TILE = 128
"""Tokens that cuDNN's kernels take at once; what fills up the last group can make a gradient infinite."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The kernel of attention, and what context-parallel ranks do (without effect where `layout.cp` is 1)."""

    kernel: AttentionKernel = "auto"
    """cuDNN's, FlashAttention's, or what `torch` dispatches to; `auto` takes the fastest that can run, and
    says which and why. FlashAttention stands in for cuDNN where windows are packed."""
    context: ContextMethod = "allgather"
    """Gather all keys and values, pass them around a ring, or exchange tokens for heads (Ulysses)."""
    context_order: ContextOrder = "zigzag"
    """Which tokens a rank holds: two chunks that balance the causal work, or one contiguous share."""

    def problems(
        self,
        *,
        window: int | None,
        cp: int,
        tp: int,
        num_heads: int,
        num_kv_heads: int,
        where: str = "model",
    ) -> list[str]:
        """Every rule that these sizes break, in words.

        Args:
            window: S, tokens of a whole window; None where they are not known.
            cp: context-parallel ranks.
            tp: tensor-parallel ranks, which have cut the heads already and cut each rank's tokens again.
            num_heads: query heads of the model.
            num_kv_heads: key/value heads of the model.
            where: the section of the configuration that holds the heads.
        """
        if min(cp, tp, num_heads, num_kv_heads) < 1:
            return []
        rules = Rules(where)
        if window is not None:
            rules.extend(window_problems(window, cp, self.context_order))
            if self.kernel == "cudnn" and not rules.broken:
                rules.extend(self._cudnn_problems(window, cp))
        if cp == 1:
            return rules.broken
        if self.context == "ulysses" and num_heads % tp == 0:
            rules.extend(head_problems(num_heads // tp, max(num_kv_heads // tp, 1), cp))
        return rules.broken

    def _cudnn_problems(self, window: int, cp: int) -> list[str]:
        whole = cp == 1 or self.context == "ulysses"
        parts = 1 if whole else chunks(cp, self.context_order)
        if window // parts % CUDNN_TILE == 0:
            return []
        what = "a window" if whole else "a chunk of a context-parallel rank"
        return [
            f"cuDNN's attention is used for multiples of {CUDNN_TILE} tokens: model.attention.kernel=cudnn, "
            f"data.window={window}, layout.cp={cp} give {what} {window // parts} tokens; {window // parts} % "
            f"{CUDNN_TILE} = {window // parts % CUDNN_TILE}. Use a window that is a multiple of "
            f"{parts * CUDNN_TILE}, or model.attention.kernel=auto."
        ]


def chunks(size: int, order: ContextOrder) -> int:
    """Into how many parts of equal length a window is cut, to be dealt out over `size` ranks."""
    return size if size == 1 or order == "contiguous" else 2 * size


def window_problems(window: int, size: int, order: ContextOrder) -> list[str]:
    """Why a window cannot be dealt out over `size` ranks, in words; empty if it can."""
    unit = chunks(size, order)
    if window % unit == 0:
        return []
    kind = "one chunk" if order == "contiguous" else "two chunks"
    below = window // unit * unit
    return [
        f"window must give each context-parallel rank {kind} of equal length: data.window={window}, "
        f"layout.cp={size}, model.attention.context_order={order}; {window} % {unit} = {window % unit}. "
        f"The nearest windows are {f'{below} and ' if below else ''}{below + unit}."
    ]


def head_problems(num_heads: int, num_kv_heads: int, size: int) -> list[str]:
    """Why Ulysses cannot deal heads out over `size` ranks, in words; empty if it can.

    Args:
        num_heads: query heads of one tensor-parallel rank.
        num_kv_heads: key/value heads of one tensor-parallel rank.
        size: number of context-parallel ranks.
    """
    legal = [n for n in divisors(num_heads) if n % num_kv_heads == 0 or num_kv_heads % n == 0]
    if size in legal:
        return []
    return [
        "ulysses deals whole heads out, so layout.cp must divide the query heads of a tensor-parallel rank, "
        "and divide its key/value heads or be a multiple of them: "
        f"model.num_heads/layout.tp={num_heads}, model.num_kv_heads/layout.tp={num_kv_heads}, "
        f"layout.cp={size}; {num_heads} % {size} = {num_heads % size}. "
        f"Choose layout.cp from {', '.join(map(str, legal))}, or model.attention.context=allgather or ring."
    ]
