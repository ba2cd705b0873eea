"""Triton kernels of the cross-entropy: a program takes a few tokens (one of a large vocabulary)."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Logits that a program holds at once."""


@triton.jit
@no_type_check
def _parts_kernel(
    logits, peak, total, count, vocab: tl.constexpr,
    FLOOR: tl.constexpr, WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    alive = rows < count
    # Each lane has a peak and a sum of its own, so that nothing is exchanged before the end.
    top = tl.full((BLOCK_T, BLOCK_V), FLOOR, dtype=WIDE)
    summed = tl.zeros((BLOCK_T, BLOCK_V), dtype=WIDE)
    for start in range(0, vocab, BLOCK_V):
        columns = start + tl.arange(0, BLOCK_V)
        inside = alive[:, None] & (columns < vocab)[None, :]
        where = rows[:, None] * vocab + columns[None, :]
        x = tl.load(logits + where, mask=inside, other=float("-inf")).to(WIDE)
        above = x - top
        ratio = tl.exp(-tl.abs(above))  # of the smaller term to the larger: one exponential for both cases
        summed = tl.where(above > 0, summed * ratio + 1, summed + ratio)
        top = tl.where(above > 0, x, top)
    highest = tl.max(top, axis=1)
    tl.store(peak + rows, highest, mask=alive)
    tl.store(total + rows, tl.sum(summed * tl.exp(top - highest[:, None]), axis=1), mask=alive)


@triton.jit
@no_type_check
def _gradient_kernel(
    logits, peak, log_total, targets, valid, upstream, count, vocab,
    WIDE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    alive = rows < count
    inside = alive[:, None] & (columns < vocab)[None, :]
    where = rows[:, None] * vocab + columns[None, :]
    counted = (tl.load(valid + rows, mask=alive, other=0) != 0)[:, None]
    top = tl.load(peak + rows, mask=alive, other=0.0)[:, None]
    spread = tl.load(log_total + rows, mask=alive, other=0.0)[:, None]
    target = tl.load(targets + rows, mask=alive, other=-1)[:, None]
    x = tl.load(logits + where, mask=inside & counted, other=float("-inf")).to(WIDE)
    value = tl.exp(x - top - spread)
    value = tl.where(columns[None, :] == target, value - 1, value) * tl.load(upstream)
    value = tl.where(counted, value, 0.0)
    tl.store(logits + where, value.to(logits.dtype.element_ty), mask=inside)


def _blocks(count: int, vocab: int) -> tuple[int, int, int]:
    """(BLOCK_T, BLOCK_V, warps)."""
    block_v = min(triton.next_power_of_2(vocab), TILE)
    block_t = min(TILE // block_v, triton.next_power_of_2(count))
    return block_t, block_v, max(1, min(8, block_t * block_v // 512))


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def launch_softmax_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax_parts` on the device of `logits`."""
    logits = logits.contiguous()
    count, vocab = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    peak, total = (logits.new_empty(count, dtype=wide) for _ in range(2))
    if count:
        block_t, block_v, warps = _blocks(count, vocab)
        _parts_kernel[(triton.cdiv(count, block_t),)](
            logits,
            peak,
            total,
            count,
            vocab,
            FLOOR=torch.finfo(wide).min,
            WIDE=_wide(wide),
            BLOCK_T=block_t,
            BLOCK_V=block_v,
            num_warps=warps,
        )
    return peak, total


def launch_cross_entropy_gradient_(
    logits: Tensor, peak: Tensor, log_total: Tensor, targets: Tensor, valid: Tensor, upstream: Tensor
) -> None:
    """`cross_entropy_gradient_` on the device of `logits`."""
    assert logits.is_contiguous()  # it is written in place
    count, vocab = logits.shape
    if count:
        block_t, block_v, warps = _blocks(count, vocab)
        _gradient_kernel[(triton.cdiv(count, block_t), triton.cdiv(vocab, block_v))](
            logits,
            peak.contiguous(),
            log_total.contiguous(),
            targets.contiguous(),
            valid.contiguous(),
            upstream,
            count,
            vocab,
            WIDE=_wide(logits.dtype),
            BLOCK_T=block_t,
            BLOCK_V=block_v,
            num_warps=warps,
        )
