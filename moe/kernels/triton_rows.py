"""Triton kernels of `scatter_rows` and `gather_rows`: one program a token and a stretch of columns."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _scatter_kernel(
    tokens, slot_row, rows, probs, by_row, hidden, K: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    # Masks are vectors, of one element if need be: Triton 3.9's interpreter takes no comparison of scalars.
    one = tl.arange(0, 1)
    first = one + tl.program_id(1) == 0
    values = tl.load(tokens + token * hidden + columns, mask=inside)
    for k in tl.static_range(K):
        row = tl.load(slot_row + token * K + k).to(tl.int64)
        place = row * hidden + columns
        tl.store(rows + place, values, mask=inside & (place >= 0))
        if BOTH:
            at = row + one
            tl.store(by_row + at, tl.load(probs + token * K + k + one), mask=first & (at >= 0))


@triton.jit
@no_type_check
def _zero_gaps_kernel(rows, by_row, counts, ends, hidden, BLOCK: tl.constexpr, BOTH: tl.constexpr):
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    row = start + tl.load(counts + expert)
    end = tl.load(ends + expert).to(tl.int64)
    zeros = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
    one = tl.arange(0, 1)
    first = one + tl.program_id(1) == 0
    while row < end:
        tl.store(rows + row * hidden + columns, zeros, mask=columns < hidden)
        if BOTH:
            tl.store(by_row + row + one, tl.zeros((1,), dtype=by_row.dtype.element_ty), mask=first)
        row += 1


@triton.jit
@no_type_check
def _gather_kernel(
    rows,
    slot_row,
    tokens,
    by_row,
    by_slot,
    hidden,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    BOTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    one = tl.arange(0, 1)
    first = one + tl.program_id(1) == 0
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for k in tl.static_range(K):
        row = tl.load(slot_row + token * K + k).to(tl.int64)
        place = row * hidden + columns
        total += tl.load(rows + place, mask=inside & (place >= 0), other=0.0).to(WIDE)
        if BOTH:
            at = row + one
            value = tl.load(by_row + at, mask=at >= 0, other=0.0)
            tl.store(by_slot + token * K + k + one, value, mask=first)
    tl.store(tokens + token * hidden + columns, total.to(tokens.dtype.element_ty), mask=inside)


def _columns(hidden: int) -> tuple[int, int, int]:
    """(BLOCK, programs along the columns, warps) for rows of `hidden` elements."""
    block = min(triton.next_power_of_2(hidden), 2048)
    return block, triton.cdiv(hidden, block), max(1, min(8, block // 256))


def launch_scatter_rows(
    tokens: Tensor,
    probs: Tensor | None,
    slot_row: Tensor,
    num_rows: int,
    counts: Tensor | None,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Rows, and their weights, on the device of `tokens`; without `probs` the second result is empty."""
    tokens, slot_row = tokens.contiguous(), slot_row.contiguous()
    count, hidden = tokens.shape
    rows, both = tokens.new_empty((num_rows, hidden)), probs is not None
    weights = tokens if probs is None else probs.contiguous()  # not read without `probs`
    by_row = weights.new_empty(num_rows if both else 0)
    block, programs, warps = _columns(hidden)
    if count:
        _scatter_kernel[(count, programs)](
            tokens,
            slot_row,
            rows,
            weights,
            by_row if both else rows,
            hidden,
            K=slot_row.shape[1],
            BLOCK=block,
            BOTH=both,
            num_warps=warps,
        )
    if ends is not None:
        assert counts is not None
        _zero_gaps_kernel[(ends.numel(), programs)](
            rows, by_row if both else rows, counts, ends, hidden, BLOCK=block, BOTH=both, num_warps=warps
        )
    return rows, by_row


def launch_gather_rows(rows: Tensor, by_row: Tensor | None, slot_row: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and a value for each slot, on the device of `rows`; without `by_row` the second is empty."""
    rows, slot_row = rows.contiguous(), slot_row.contiguous()
    count, topk = slot_row.shape
    hidden, both = rows.shape[1], by_row is not None
    tokens = rows.new_empty((count, hidden))
    values = rows if by_row is None else by_row.contiguous()  # not read without `by_row`
    by_slot = values.new_empty(slot_row.shape if both else (0, topk))
    block, programs, warps = _columns(hidden)
    wide = tl.float64 if rows.dtype == torch.float64 else tl.float32
    if count:
        _gather_kernel[(count, programs)](
            rows,
            slot_row,
            tokens,
            values,
            by_slot if both else tokens,
            hidden,
            K=topk,
            BLOCK=block,
            WIDE=wide,
            BOTH=both,
            num_warps=warps,
        )
    return tokens, by_slot
