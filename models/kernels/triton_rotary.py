"""Triton kernel of the rotation: one program a token, all its heads."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
@no_type_check
def _rotate_kernel(
    x, cos, sin, out, N: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pairs = tl.arange(0, BLOCK_D)
    c = tl.load(cos + token * HALF + pairs, mask=pairs < HALF, other=0.0)
    s = tl.load(sin + token * HALF + pairs, mask=pairs < HALF, other=0.0)
    if INVERSE:
        s = -s
    inside = (heads < N)[:, None] & (pairs < HALF)[None, :]
    where = (token * N + heads[:, None]) * 2 * HALF + pairs[None, :]
    first = tl.load(x + where, mask=inside, other=0.0).to(c.dtype)
    second = tl.load(x + where + HALF, mask=inside, other=0.0).to(c.dtype)
    kind = out.dtype.element_ty
    tl.store(out + where, (first * c[None, :] - second * s[None, :]).to(kind), mask=inside)
    tl.store(out + where + HALF, (second * c[None, :] + first * s[None, :]).to(kind), mask=inside)


def launch_rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """`rotate_pairs` on the device of `x`."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    batch, length, heads, width = x.shape
    out = torch.empty_like(x)
    half = width // 2
    block_d = triton.next_power_of_2(half)
    block_n = max(1, min(triton.next_power_of_2(heads), 2048 // block_d))
    if x.numel():
        _rotate_kernel[(batch * length, triton.cdiv(heads, block_n))](
            x, cos, sin, out, N=heads, HALF=half, BLOCK_N=block_n, BLOCK_D=block_d, INVERSE=inverse
        )
    return out
