"""Moving rows between token order and expert order: `scatter_rows` (permute) and `gather_rows` (unpermute).

They are each other's gradient: permuting reads a token's row once and writes it K times; its backward, like
unpermuting, reads the K rows of a token and adds them in fp32 in slot order, without atomics.
"""

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor


def scatter_rows_twin(
    tokens: Float[Tensor, "T H"], slot_row: Int[Tensor, "T K"], num_rows: int
) -> Float[Tensor, "R H"]:
    """`scatter_rows` by indexed assignment; rows that no slot fills are zero."""
    rows = tokens.new_zeros((num_rows, tokens.shape[1]))
    token, slot = (slot_row >= 0).nonzero(as_tuple=True)
    rows[slot_row[token, slot].long()] = tokens[token]
    return rows


def gather_rows_twin(rows: Float[Tensor, "R H"], slot_row: Int[Tensor, "T K"]) -> Float[Tensor, "T H"]:
    """`gather_rows` by indexing and a sum over slots in at least fp32."""
    if rows.shape[0] == 0:
        return rows.new_zeros((slot_row.shape[0], rows.shape[1]))
    kept = (slot_row >= 0).unsqueeze(-1)
    picked = torch.where(kept, rows[slot_row.clamp(min=0).long()], 0)
    return picked.sum(dim=1, dtype=torch.promote_types(rows.dtype, torch.float32)).to(rows.dtype)


def run_scatter_rows(
    tokens: Tensor,
    slot_row: Tensor,
    num_rows: int,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Copy each token's row to the rows of its kept slots.

    Args:
        tokens: `[T, H]`.
        slot_row: int32 `[T, K]` from `row_map`, -1 for a slot that is not kept.
        num_rows: R, the rows to allocate; at least every index in `slot_row` plus one.
        counts: int32 `[E]` from `row_map(align > 1)`; given with `ends`, the padding rows become zero.
        ends: int32 `[E]`, the padded ends from the same call.

    Returns:
        `[R, H]`. Rows that belong to no slot are zero up to the last end where `ends` is given, and
        unspecified elsewhere.
    """
    if tokens.is_cuda:
        from isozyme.moe.kernels.triton_rows import launch_scatter_rows

        return launch_scatter_rows(tokens, slot_row, num_rows, counts, ends)
    return scatter_rows_twin(tokens, slot_row, num_rows)


scatter_rows = torch.library.custom_op("isozyme::scatter_rows", run_scatter_rows, mutates_args=())


@scatter_rows.register_fake
@no_type_check
def _(
    tokens: Tensor,
    slot_row: Tensor,
    num_rows: int,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    del slot_row, counts, ends
    return tokens.new_empty((num_rows, tokens.shape[1]))


def run_gather_rows(
    rows: Tensor, slot_row: Tensor, counts: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Add up the rows of each token's kept slots, in at least fp32 and in slot order.

    Args:
        rows: `[R, H]`, expert-major.
        slot_row: int32 `[T, K]` from `row_map`.
        counts: int32 `[E]` from `row_map(align > 1)`; given with `ends`, the gradient of padding rows is zero
            rather than unspecified.
        ends: int32 `[E]` from the same call.

    Returns:
        `[T, H]` in the dtype of `rows`; zeros for a token without kept slots.
    """
    del counts, ends
    if rows.is_cuda:
        from isozyme.moe.kernels.triton_rows import launch_gather_rows

        return launch_gather_rows(rows, slot_row)
    return gather_rows_twin(rows, slot_row)


gather_rows = torch.library.custom_op("isozyme::gather_rows", run_gather_rows, mutates_args=())


@gather_rows.register_fake
@no_type_check
def _(rows: Tensor, slot_row: Tensor, counts: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
    del counts, ends
    return rows.new_empty((slot_row.shape[0], rows.shape[1]))


def _save_scatter(ctx, inputs, output):  # type: ignore[no-untyped-def]
    del output
    _, slot_row, _, counts, ends = inputs
    ctx.save_for_backward(slot_row, counts, ends)


def _save_gather(ctx, inputs, output):  # type: ignore[no-untyped-def]
    del output
    rows, slot_row, counts, ends = inputs
    ctx.save_for_backward(slot_row, counts, ends)
    ctx.num_rows = rows.shape[0]


def _scatter_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return gather_rows(grad.contiguous(), *ctx.saved_tensors), None, None, None, None


def _gather_backward(ctx, grad):  # type: ignore[no-untyped-def]
    slot_row, counts, ends = ctx.saved_tensors
    return scatter_rows(grad.contiguous(), slot_row, ctx.num_rows, counts, ends), None, None, None


scatter_rows.register_autograd(_scatter_backward, setup_context=_save_scatter)
gather_rows.register_autograd(_gather_backward, setup_context=_save_gather)
