"""Triton kernel of the mixed-precision accumulation."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
@no_type_check
def _accumulate_kernel(total, part, count, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    kind = total.dtype.element_ty
    value = tl.load(part + places, mask=inside, other=0.0).to(kind)
    if not FIRST:
        value = tl.load(total + places, mask=inside, other=0.0) + value
    tl.store(total + places, value, mask=inside)


def launch_accumulate(total: Tensor, part: Tensor, *, first: bool = False) -> None:
    """`accumulate` on the device of `total`, for contiguous tensors of one shape."""
    assert total.shape == part.shape
    count = total.numel()
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        _accumulate_kernel[grid](total, part, count, FIRST=first, BLOCK=_BLOCK, num_warps=8)
