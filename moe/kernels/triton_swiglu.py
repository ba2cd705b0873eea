"""Triton kernels of SwiGLU times the combine weight: one program a row, one loop over its columns.

Where `filled` is given, programs of rows from that number on return before they touch memory.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _forward_kernel(hidden, probs, filled, out, ffn, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if filled is not None:  # noqa: SIM102 (decided when compiled; without it there is nothing to load)
        if row >= tl.load(filled):
            return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < ffn
    gate = tl.load(hidden + row * 2 * ffn + columns, mask=inside, other=0.0).to(WIDE)
    up = tl.load(hidden + row * 2 * ffn + ffn + columns, mask=inside, other=0.0).to(WIDE)
    weight = tl.load(probs + row).to(WIDE)
    value = gate / (1 + tl.exp(-gate)) * up * weight
    tl.store(out + row * ffn + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _backward_kernel(
    grad, hidden, probs, filled, d_hidden, d_probs, out, ffn: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if filled is not None:  # noqa: SIM102 (decided when compiled; without it there is nothing to load)
        if row >= tl.load(filled):
            return
    weight = tl.load(probs + row).to(WIDE)
    total = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, ffn, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < ffn
        gate = tl.load(hidden + row * 2 * ffn + columns, mask=inside, other=0.0).to(WIDE)
        up = tl.load(hidden + row * 2 * ffn + ffn + columns, mask=inside, other=0.0).to(WIDE)
        upstream = tl.load(grad + row * ffn + columns, mask=inside, other=0.0).to(WIDE)
        sigmoid = 1 / (1 + tl.exp(-gate))
        silu = gate * sigmoid
        plain = silu * up
        total += upstream * plain
        weighted = upstream * weight
        d_gate = weighted * up * (sigmoid * (1 + gate * (1 - sigmoid)))
        kind = d_hidden.dtype.element_ty
        tl.store(d_hidden + row * 2 * ffn + columns, d_gate.to(kind), mask=inside)
        tl.store(d_hidden + row * 2 * ffn + ffn + columns, (weighted * silu).to(kind), mask=inside)
        tl.store(out + row * ffn + columns, (plain * weight).to(kind), mask=inside)
    tl.store(d_probs + row, tl.sum(total, axis=0).to(d_probs.dtype.element_ty))


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def launch_swiglu_prob(hidden: Tensor, probs: Tensor, filled: Tensor | None = None) -> Tensor:
    """`swiglu_prob` on the device of `hidden`."""
    hidden, probs = hidden.contiguous(), probs.contiguous()
    count, ffn = hidden.shape[0], hidden.shape[1] // 2
    out = hidden.new_empty((count, ffn))
    block = min(triton.next_power_of_2(ffn), 2048)
    if count:
        grid = (count, triton.cdiv(ffn, block))
        _forward_kernel[grid](
            hidden,
            probs,
            filled,
            out,
            ffn,
            BLOCK=block,
            WIDE=_wide(hidden.dtype),
            num_warps=max(1, min(8, block // 256)),
        )
    return out


def launch_swiglu_prob_backward(
    grad: Tensor, hidden: Tensor, probs: Tensor, filled: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu_prob_backward` on the device of `hidden`."""
    grad, hidden, probs = grad.contiguous(), hidden.contiguous(), probs.contiguous()
    count, ffn = grad.shape
    d_hidden, d_probs, out = torch.empty_like(hidden), torch.empty_like(probs), torch.empty_like(grad)
    block = min(triton.next_power_of_2(ffn), 1024)
    if count:
        _backward_kernel[(count,)](
            grad,
            hidden,
            probs,
            filled,
            d_hidden,
            d_probs,
            out,
            ffn,
            BLOCK=block,
            WIDE=_wide(hidden.dtype),
            num_warps=max(1, min(8, block // 256)),
        )
    return d_hidden, d_probs, out
