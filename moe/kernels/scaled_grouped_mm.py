"""The grouped product of 8-bit rows and 8-bit weights, each row of either with a scale of its own.

On CUDA it is torch's operator, by the name `torch._scaled_grouped_mm`, which takes the same arguments in all
supported versions; the public `torch.nn.functional.scaled_grouped_mm` of later ones is another way to the
same kernel. torch has it for no other device: elsewhere it is emulated.
"""

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from isozyme.moe.kernels.fp8_rows import dequantize_rows


def scaled_grouped_mm_twin(
    rows: Float[Tensor, "R I"],
    row_scales: Float[Tensor, "R"],
    weights: Float[Tensor, "E O I"],
    weight_scales: Float[Tensor, "E O"],
    ends: Int[Tensor, "E"],
    dtype: torch.dtype,
) -> Float[Tensor, "R O"]:
    """`scaled_grouped_mm` of dequantised operands in fp32, rounded once."""
    left, right = dequantize_rows(rows, row_scales), dequantize_rows(weights, weight_scales)
    return F.grouped_mm(left, right.mT, offs=ends).to(dtype)


def run_scaled_grouped_mm(
    rows: Tensor, row_scales: Tensor, weights: Tensor, weight_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """`rows @ weights[e].T`, both dequantised, for the rows of each expert e. It has no gradient.

    On Hopper sums are the tensor cores' own (fast accumulation), in fewer bits than fp32.

    Args:
        rows: `[R, I]` `float8_e4m3fn`, by expert.
        row_scales: `[R]` fp32.
        weights: `[E, O, I]` `float8_e4m3fn`; O and I are multiples of 16.
        weight_scales: `[E, O]` fp32.
        ends: `[E]` int32, the end of each expert's rows.
        dtype: of the result; bf16 on CUDA.

    Returns:
        `[R, O]`; unspecified in rows from the last end on.
    """
    if rows.is_cuda:
        result: Tensor = torch._scaled_grouped_mm(
            rows, weights.mT, row_scales, weight_scales, offs=ends, out_dtype=dtype, use_fast_accum=True
        )
        return result
    return scaled_grouped_mm_twin(rows, row_scales, weights, weight_scales, ends, dtype)


scaled_grouped_mm = torch.library.custom_op(
    "isozyme::scaled_grouped_mm", run_scaled_grouped_mm, mutates_args=()
)


@scaled_grouped_mm.register_fake
@no_type_check
def _(
    rows: Tensor, row_scales: Tensor, weights: Tensor, weight_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    del row_scales, weight_scales, ends
    return rows.new_empty((rows.shape[0], weights.shape[1]), dtype=dtype)
