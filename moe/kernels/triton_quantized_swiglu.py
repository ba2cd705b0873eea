"""Triton kernels of the SwiGLU that quantises: one program a row, with the whole row in registers.

Programs of rows from `filled` on return before they touch memory.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from isozyme.moe.kernels.triton_fp8 import encode, magnitude_bits, row_block, scale_of


@triton.jit
@no_type_check
def _forward_kernel(hidden, probs, filled, codes, scales, ffn, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(filled):
        return
    columns = tl.arange(0, BLOCK)
    inside = columns < ffn
    gate = tl.load(hidden + row * 2 * ffn + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * ffn + ffn + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(probs + row).to(tl.float32)
    value = gate / (1 + tl.exp(-gate)) * up * weight
    value = value.to(hidden.dtype.element_ty).to(tl.float32)
    scale = scale_of(tl.max(magnitude_bits(value), axis=0).to(tl.float32, bitcast=True))
    tl.store(codes + row * ffn + columns, encode(value, scale), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
@no_type_check
def _backward_kernel(
    grad, hidden, probs, filled, codes, scales, d_hidden, d_probs, out, ffn, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(filled):
        return
    columns = tl.arange(0, BLOCK)
    inside = columns < ffn
    left = row * 2 * ffn + columns
    kind = d_hidden.dtype.element_ty
    gate = tl.load(hidden + left, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(hidden + left + ffn, mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(grad + row * ffn + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(probs + row).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    silu = gate * sigmoid
    plain = silu * up
    tl.store(out + row * ffn + columns, (plain * weight).to(kind), mask=inside)
    tl.store(d_probs + row, tl.sum(upstream * plain, axis=0).to(d_probs.dtype.element_ty))
    weighted = upstream * weight
    d_gate = (weighted * up * (sigmoid * (1 + gate * (1 - sigmoid)))).to(kind)
    d_up = (weighted * silu).to(kind)
    tl.store(d_hidden + left, d_gate, mask=inside)
    tl.store(d_hidden + left + ffn, d_up, mask=inside)
    bits = tl.maximum(magnitude_bits(d_gate.to(tl.float32)), magnitude_bits(d_up.to(tl.float32)))
    scale = scale_of(tl.max(bits, axis=0).to(tl.float32, bitcast=True))
    tl.store(codes + left, encode(d_gate.to(tl.float32), scale), mask=inside)
    tl.store(codes + left + ffn, encode(d_up.to(tl.float32), scale), mask=inside)
    tl.store(scales + row, scale)


def launch_quantized_swiglu(hidden: Tensor, probs: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
    """`quantized_swiglu` on the device of `hidden`."""
    hidden, probs = hidden.contiguous(), probs.contiguous()
    count, ffn = hidden.shape[0], hidden.shape[1] // 2
    codes = hidden.new_empty((count, ffn), dtype=torch.float8_e4m3fn)
    scales = hidden.new_empty(count, dtype=torch.float32)
    block, warps = row_block(ffn)
    if count:
        _forward_kernel[(count,)](hidden, probs, filled, codes, scales, ffn, BLOCK=block, num_warps=warps)
    return codes, scales


def launch_quantized_swiglu_backward(
    grad: Tensor, hidden: Tensor, probs: Tensor, filled: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`quantized_swiglu_backward` on the device of `hidden`."""
    grad, hidden, probs = grad.contiguous(), hidden.contiguous(), probs.contiguous()
    count, ffn = grad.shape
    codes = torch.empty_like(hidden, dtype=torch.float8_e4m3fn)
    scales = hidden.new_empty(count, dtype=torch.float32)
    d_hidden, d_probs, out = torch.empty_like(hidden), torch.empty_like(probs), torch.empty_like(grad)
    block, warps = row_block(ffn)
    if count:
        _backward_kernel[(count,)](
            grad, hidden, probs, filled, codes, scales, d_hidden, d_probs, out, ffn,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return codes, scales, d_hidden, d_probs, out
