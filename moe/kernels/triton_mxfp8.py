"""Triton kernel of the two-way MXFP8 quantisation: a 32-row tile is read once and quantised twice."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from isozyme.core.mxfp8 import BLOCK, E4M3_MAX


@triton.jit
@no_type_check
def _scale_code(amax, reciprocal):
    value = (amax * reciprocal).to(tl.float32)
    bits = value.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    tiny = (exponent == 0) & (mantissa <= 0x400000)
    code = exponent + tl.where((mantissa > 0) & (exponent != 254) & (tiny == 0), 1, 0)
    return tl.minimum(code, 254)


@triton.jit
@no_type_check
def _power(code):
    bits = tl.where(code == 0, 0x400000, code << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _encode(x, code, limit):
    scaled = x * _power(254 - code)
    clamped = tl.minimum(tl.maximum(scaled, -limit), limit)
    return tl.where(x == x, clamped, x).to(tl.float8e4nv)


@triton.jit
@no_type_check
def _quantize_kernel(
    x, row_codes, row_scales, column_codes, column_scales, num_rows, num_columns, reciprocal, limit,
    COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    stripe, tile = tl.program_id(0), tl.program_id(1)
    rows = stripe * SIZE + tl.arange(0, SIZE)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    where = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    values = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.where(values == values, tl.abs(values), 0.0)

    code = _scale_code(tl.max(magnitude, axis=0), reciprocal)
    tl.store(column_codes + where, _encode(values, code[None, :], limit), mask=inside)
    tl.store(
        column_scales + stripe.to(tl.int64) * num_columns + columns,
        code.to(tl.uint8),
        mask=columns < num_columns,
    )

    blocks: tl.constexpr = COLUMNS // SIZE
    code = _scale_code(tl.max(tl.reshape(magnitude, (SIZE, blocks, SIZE)), axis=2), reciprocal)
    spread = tl.reshape(tl.broadcast_to(code[:, :, None], (SIZE, blocks, SIZE)), (SIZE, COLUMNS))
    tl.store(row_codes + where, _encode(values, spread, limit), mask=inside)
    block = tile * blocks + tl.arange(0, blocks)
    total = (num_columns + SIZE - 1) // SIZE
    tl.store(
        row_scales + rows.to(tl.int64)[:, None] * total + block[None, :],
        code.to(tl.uint8),
        mask=(rows < num_rows)[:, None] & (block < total)[None, :],
    )


def launch_mxfp8_quantize_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mxfp8_quantize_both` on the device of `x`."""
    x = x.contiguous()
    rows, columns = x.shape
    stripes, blocks = triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)
    row_codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    column_codes = torch.empty_like(row_codes)
    row_scales = x.new_empty((rows, blocks), dtype=torch.uint8)
    column_scales = x.new_empty((stripes, columns), dtype=torch.uint8)
    width = max(BLOCK, min(128, triton.next_power_of_2(columns)))
    if x.numel():
        reciprocal = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32).item()
        _quantize_kernel[(stripes, triton.cdiv(columns, width))](
            x, row_codes, row_scales, column_codes, column_scales, rows, columns, reciprocal, E4M3_MAX,
            COLUMNS=width, SIZE=BLOCK,
        )  # fmt: skip
    return row_codes, row_scales, column_codes, column_scales
