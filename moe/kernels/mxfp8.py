"""MXFP8 quantisation, row-wise (1x32) and column-wise (32x1) from one read of the source.

A GEMM operand is quantised along its contraction dim, so training needs both copies: one for the forward or
dgrad product, the other for the wgrad. The twin is `isozyme.core.mxfp8`, which defines the format.
"""

from typing import no_type_check

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from isozyme.core.mxfp8 import BLOCK, quantize_mxfp8


def mxfp8_quantize_both_twin(
    x: Float[Tensor, "R C"],
) -> tuple[Float[Tensor, "R C"], UInt8[Tensor, "R CB"], Float[Tensor, "R C"], UInt8[Tensor, "RB C"]]:
    """`mxfp8_quantize_both` as two quantisations."""
    by_row, by_column = quantize_mxfp8(x, dim=1), quantize_mxfp8(x, dim=0)
    return (
        by_row.codes.contiguous(),
        by_row.scales.contiguous(),
        by_column.codes.contiguous(),
        by_column.scales.contiguous(),
    )


@torch.library.custom_op("isozyme::mxfp8_quantize_both", mutates_args=())
def mxfp8_quantize_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise a matrix along both dims.

    Args:
        x: `[R, C]`; a last, shorter block along either dim counts as padded with zeros.

    Returns:
        `float8_e4m3fn [R, C]` and its `uint8 [R, ceil(C/32)]` scales (blocks along C), then `[R, C]` and
        `[ceil(R/32), C]` (blocks along R).
    """
    if x.is_cuda:
        from isozyme.moe.kernels.triton_mxfp8 import launch_mxfp8_quantize_both

        return launch_mxfp8_quantize_both(x)
    return mxfp8_quantize_both_twin(x)


@mxfp8_quantize_both.register_fake
@no_type_check
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    return (
        codes,
        x.new_empty((rows, -(-columns // BLOCK)), dtype=torch.uint8),
        torch.empty_like(codes),
        x.new_empty((-(-rows // BLOCK), columns), dtype=torch.uint8),
    )
