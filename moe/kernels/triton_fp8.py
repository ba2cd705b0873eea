"""What the Triton kernels that write row-wise FP8 share; the format is `isozyme.moe.kernels.fp8_rows`."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from isozyme.moe.kernels.fp8_rows import RECIPROCAL_MAX, SMALLEST_SCALE

_RECIPROCAL_MAX = tl.constexpr(RECIPROCAL_MAX)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_MOST_WARPS = 32


@triton.jit
@no_type_check
def magnitude_bits(values):
    """The bits of |values| (fp32) as int32: ordered as the magnitudes are, and NaN is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
@no_type_check
def scale_of(amax):
    """The scale for a largest magnitude; NaN for NaN."""
    scale = amax * _RECIPROCAL_MAX
    return tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)


@triton.jit
@no_type_check
def encode(values, scale):
    """E4M3 codes."""
    return (values * tl.div_rn(1.0, scale)).to(tl.float8e4nv)


def row_block(width: int, a_thread: int = 16) -> tuple[int, int]:
    """(BLOCK, warps) of a program that holds a whole row in registers, `a_thread` elements in a thread."""
    block = max(16, triton.next_power_of_2(width))
    return block, max(1, min(_MOST_WARPS, block // (32 * a_thread)))
