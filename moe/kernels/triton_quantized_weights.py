"""Triton kernels of the 8-bit copies of weights: rows with the columns' maxima, then transposed tiles."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from isozyme.moe.kernels.triton_fp8 import encode, magnitude_bits, row_block, scale_of

_ROWS = 64
"""Rows of one program of the first pass: one atomic maximum a column for all of them."""
_TILE = 64
"""Sides of a tile of the second pass. 64 rows and tiles of 64 were the fastest on an H200 (3.5-3.8 TB/s)."""


@triton.jit
@no_type_check
def _rows_kernel(weights, codes, scales, maxima, outputs, inputs, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(1).to(tl.int64)
    first = expert * outputs + tl.program_id(0) * ROWS
    last = tl.minimum(first + ROWS, (expert + 1) * outputs) - 1
    columns = tl.arange(0, BLOCK)
    inside = columns < inputs
    found = tl.zeros((BLOCK,), dtype=tl.int32)
    coming = tl.load(weights + first * inputs + columns, mask=inside, other=0.0)
    for step in range(ROWS):
        row = tl.minimum(first + step, last)  # beyond the last row, that one again
        values = coming.to(tl.float32)
        # The next row is on its way while this one is reduced.
        coming = tl.load(weights + tl.minimum(row + 1, last) * inputs + columns, mask=inside, other=0.0)
        bits = magnitude_bits(values)
        found = tl.maximum(found, bits)
        scale = scale_of(tl.max(bits, axis=0).to(tl.float32, bitcast=True))
        tl.store(codes + row * inputs + columns, encode(values, scale), mask=inside)
        tl.store(scales + row, scale)
    tl.atomic_max(maxima + expert * inputs + columns, found, mask=inside, sem="relaxed")


@triton.jit
@no_type_check
def _columns_kernel(weights, maxima, codes, scales, outputs, inputs, TILE: tl.constexpr):
    expert = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    below, inside = rows < outputs, columns < inputs
    place = (expert * outputs + rows)[:, None] * inputs + columns[None, :]
    values = tl.load(weights + place, mask=below[:, None] & inside[None, :], other=0.0).to(tl.float32)
    scale = scale_of(tl.load(maxima + expert * inputs + columns, mask=inside, other=0.0))
    code = encode(values, scale[None, :])
    turned = (expert * inputs + columns)[:, None] * outputs + rows[None, :]
    tl.store(codes + turned, tl.trans(code), mask=inside[:, None] & below[None, :])
    first = tl.arange(0, TILE) * 0 + tl.program_id(0) == 0
    tl.store(scales + expert * inputs + columns, scale, mask=inside & first)


def launch_quantize_weights(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_weights` on the device of `weights`."""
    weights = weights.contiguous()
    experts, outputs, inputs = weights.shape
    codes = torch.empty_like(weights, dtype=torch.float8_e4m3fn)
    scales = weights.new_empty((experts, outputs), dtype=torch.float32)
    maxima = weights.new_zeros((experts, inputs), dtype=torch.int32)
    block, warps = row_block(inputs)
    _rows_kernel[(triton.cdiv(outputs, _ROWS), experts)](
        weights, codes, scales, maxima, outputs, inputs, ROWS=_ROWS, BLOCK=block, num_warps=warps
    )
    return codes, scales, maxima.view(torch.float32)


def launch_quantize_transposed(weights: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_transposed` on the device of `weights`."""
    weights, maxima = weights.contiguous(), maxima.contiguous()
    experts, outputs, inputs = weights.shape
    codes = weights.new_empty((experts, inputs, outputs), dtype=torch.float8_e4m3fn)
    scales = torch.empty_like(maxima)
    grid = (triton.cdiv(outputs, _TILE), triton.cdiv(inputs, _TILE), experts)
    _columns_kernel[grid](weights, maxima, codes, scales, outputs, inputs, TILE=_TILE, num_warps=8)
    return codes, scales
