"""Triton kernels of `scatter_rows` and `gather_rows`: one program a token and a stretch of columns."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _scatter_kernel(tokens, slot_row, rows, hidden, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(tokens + token * hidden + columns, mask=inside)
    for k in tl.static_range(K):
        place = tl.load(slot_row + token * K + k).to(tl.int64) * hidden + columns
        tl.store(rows + place, values, mask=inside & (place >= 0))


@triton.jit
@no_type_check
def _zero_gaps_kernel(rows, counts, ends, hidden, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    row = start + tl.load(counts + expert)
    end = tl.load(ends + expert).to(tl.int64)
    zeros = tl.zeros((BLOCK,), dtype=rows.dtype.element_ty)
    while row < end:
        tl.store(rows + row * hidden + columns, zeros, mask=columns < hidden)
        row += 1


@triton.jit
@no_type_check
def _gather_kernel(rows, slot_row, tokens, hidden, K: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for k in tl.static_range(K):
        place = tl.load(slot_row + token * K + k).to(tl.int64) * hidden + columns
        total += tl.load(rows + place, mask=inside & (place >= 0), other=0.0).to(WIDE)
    tl.store(tokens + token * hidden + columns, total.to(tokens.dtype.element_ty), mask=inside)


def _columns(hidden: int) -> tuple[int, int, int]:
    """(BLOCK, programs along the columns, warps) for rows of `hidden` elements."""
    block = min(triton.next_power_of_2(hidden), 2048)
    return block, triton.cdiv(hidden, block), max(1, min(8, block // 256))


def launch_scatter_rows(
    tokens: Tensor, slot_row: Tensor, num_rows: int, counts: Tensor | None, ends: Tensor | None
) -> Tensor:
    """`scatter_rows` on the device of `tokens`."""
    tokens, slot_row = tokens.contiguous(), slot_row.contiguous()
    count, hidden = tokens.shape
    rows = tokens.new_empty((num_rows, hidden))
    block, programs, warps = _columns(hidden)
    if count:
        _scatter_kernel[(count, programs)](
            tokens, slot_row, rows, hidden, K=slot_row.shape[1], BLOCK=block, num_warps=warps
        )
    if ends is not None:
        assert counts is not None
        _zero_gaps_kernel[(ends.numel(), programs)](rows, counts, ends, hidden, BLOCK=block, num_warps=warps)
    return rows


def launch_gather_rows(rows: Tensor, slot_row: Tensor) -> Tensor:
    """`gather_rows` on the device of `rows`."""
    rows, slot_row = rows.contiguous(), slot_row.contiguous()
    count, topk = slot_row.shape
    hidden = rows.shape[1]
    tokens = rows.new_empty((count, hidden))
    block, programs, warps = _columns(hidden)
    wide = tl.float64 if rows.dtype == torch.float64 else tl.float32
    if count:
        _gather_kernel[(count, programs)](
            rows, slot_row, tokens, hidden, K=topk, BLOCK=block, WIDE=wide, num_warps=warps
        )
    return tokens
