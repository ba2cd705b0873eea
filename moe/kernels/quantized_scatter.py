"""Permuting rows that are quantised on the way: read once in 16 bits, written K times in 8.

Each token's row has one scale, found before the permutation; every copy of the row takes it along. For weight
gradients, which are computed in the tokens' own type, the same pass can write that copy too.
"""

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.kernels.fp8_rows import quantize_rows
from isozyme.moe.kernels.rows import scatter_probs_twin, scatter_rows_twin


def scatter_quantized_twin(
    tokens: Float[Tensor, "T H"],
    probs: Float[Tensor, "T K"] | None,
    slot_row: Int[Tensor, "T K"],
    num_rows: int,
    keep: bool,
) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R"], Float[Tensor, "W"], Float[Tensor, "L H"]]:
    """`scatter_quantized` as a quantisation and permutations; rows that no slot fills are zero."""
    codes, scales = quantize_rows(tokens)
    moved = scatter_rows_twin(codes.float(), slot_row, num_rows).to(codes.dtype)
    by_row = scatter_probs_twin(scales[:, None].expand(slot_row.shape), slot_row, num_rows)
    weights = scales.new_empty(0) if probs is None else scatter_probs_twin(probs, slot_row, num_rows)
    rows = scatter_rows_twin(tokens, slot_row, num_rows) if keep else tokens.new_empty((0, tokens.shape[1]))
    return moved, by_row, weights, rows


def run_scatter_quantized(
    tokens: Tensor, probs: Tensor | None, slot_row: Tensor, num_rows: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise each token's row and copy it to the rows of its kept slots. It has no gradient.

    Args:
        tokens: `[T, H]`.
        probs: `[T, K]` combine weights, at least fp32; None if none travel along.
        slot_row: `[T, K]` int32 from `row_map`, -1 for a slot that is not kept.
        num_rows: R, the rows to allocate; at least every index in `slot_row` plus one.
        keep: also copy the rows as they are.

    Returns:
        `[R, H]` `float8_e4m3fn` codes, `[R]` fp32 scales, `[R]` weights (`[0]` without `probs`) and `[R, H]`
        rows (`[0, H]` if not kept). Unspecified in rows that no slot fills.
    """
    if tokens.is_cuda:
        from isozyme.moe.kernels.triton_quantized_scatter import launch_scatter_quantized

        return launch_scatter_quantized(tokens, probs, slot_row, num_rows, keep)
    return scatter_quantized_twin(tokens, probs, slot_row, num_rows, keep)


scatter_quantized = torch.library.custom_op(
    "isozyme::scatter_quantized", run_scatter_quantized, mutates_args=()
)


@scatter_quantized.register_fake
@no_type_check
def _(
    tokens: Tensor, probs: Tensor | None, slot_row: Tensor, num_rows: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del slot_row
    wide = tokens.new_empty(num_rows, dtype=torch.float32)
    return (
        tokens.new_empty((num_rows, tokens.shape[1]), dtype=torch.float8_e4m3fn),
        wide,
        wide.new_empty(0) if probs is None else probs.new_empty(num_rows),
        tokens.new_empty((num_rows if keep else 0, tokens.shape[1])),
    )
