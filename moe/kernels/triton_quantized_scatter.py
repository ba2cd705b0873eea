"""Triton kernel of `scatter_quantized`: one program a token, with its whole row in registers."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from isozyme.moe.kernels.triton_fp8 import encode, magnitude_bits, row_block, scale_of


@triton.jit
@no_type_check
def _scatter_kernel(
    tokens, probs, slot_row, codes, scales, by_row, rows, hidden,
    K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    given = tl.load(tokens + token * hidden + columns, mask=inside, other=0.0)
    values = given.to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(values), axis=0).to(tl.float32, bitcast=True))
    code = encode(values, scale)
    for k in tl.static_range(K):
        row = tl.load(slot_row + token * K + k).to(tl.int64)
        if row >= 0:
            tl.store(codes + row * hidden + columns, code, mask=inside)
            tl.store(scales + row, scale)
            if WEIGHTS:
                tl.store(by_row + row, tl.load(probs + token * K + k))
            if KEEP:
                tl.store(rows + row * hidden + columns, given, mask=inside)


def launch_scatter_quantized(
    tokens: Tensor, probs: Tensor | None, slot_row: Tensor, num_rows: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`scatter_quantized` on the device of `tokens`."""
    tokens, slot_row = tokens.contiguous(), slot_row.contiguous()
    count, hidden = tokens.shape
    codes = tokens.new_empty((num_rows, hidden), dtype=torch.float8_e4m3fn)
    scales = tokens.new_empty(num_rows, dtype=torch.float32)
    weights = scales if probs is None else probs.contiguous()  # not read without `probs`
    by_row = weights.new_empty(0 if probs is None else num_rows)
    rows = tokens.new_empty((num_rows if keep else 0, hidden))
    block, warps = row_block(hidden)
    if count:
        _scatter_kernel[(count,)](
            tokens, weights, slot_row, codes, scales, by_row, rows, hidden,
            K=slot_row.shape[1], BLOCK=block, WEIGHTS=probs is not None, KEEP=keep, num_warps=warps,
        )  # fmt: skip
    return codes, scales, by_row, rows
