"""Moving rows between token order and expert order: `scatter_rows` (permute) and `gather_rows` (unpermute).

They are each other's gradient: permuting reads a token's row once and writes it K times; its backward, like
unpermuting, reads the K rows of a token and adds them in fp32 in slot order, without atomics. Where combine
weights travel along, `scatter_rows_and_probs` and `gather_rows_and_probs` move both in the same pass.
"""

from functools import partial
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.kernels import direct, eager


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


def scatter_probs_twin(
    probs: Float[Tensor, "T K"], slot_row: Int[Tensor, "T K"], num_rows: int
) -> Float[Tensor, "R"]:
    """The combine weight of each row; zero for rows that no slot fills."""
    place = torch.where(slot_row < 0, num_rows, slot_row).flatten().long()
    return probs.new_zeros(num_rows + 1).scatter(0, place, probs.flatten())[:-1]


def gather_probs_twin(by_row: Float[Tensor, "R"], slot_row: Int[Tensor, "T K"]) -> Float[Tensor, "T K"]:
    """The inverse: the value of each slot's row; zero for a slot without one."""
    if by_row.shape[0] == 0:
        return by_row.new_zeros(slot_row.shape)
    picked = by_row[slot_row.clamp(min=0).long()]
    return torch.where(slot_row < 0, torch.zeros_like(picked), picked)


def run_scatter_rows(
    tokens: Tensor,
    slot_row: Tensor,
    num_rows: int,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """`scatter_rows` without a graph."""
    if tokens.is_cuda:
        from isozyme.moe.kernels.triton_rows import launch_scatter_rows

        return launch_scatter_rows(tokens, None, slot_row, num_rows, counts, ends)[0]
    return scatter_rows_twin(tokens, slot_row, num_rows)


scatter_rows_op = torch.library.custom_op("isozyme::scatter_rows", run_scatter_rows, mutates_args=())


@scatter_rows_op.register_fake
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
    """`gather_rows` without a graph."""
    del counts, ends
    if rows.is_cuda:
        from isozyme.moe.kernels.triton_rows import launch_gather_rows

        return launch_gather_rows(rows, None, slot_row)[0]
    return gather_rows_twin(rows, slot_row)


gather_rows_op = torch.library.custom_op("isozyme::gather_rows", run_gather_rows, mutates_args=())


@gather_rows_op.register_fake
@no_type_check
def _(rows: Tensor, slot_row: Tensor, counts: Tensor | None = None, ends: Tensor | None = None) -> Tensor:
    del counts, ends
    return rows.new_empty((slot_row.shape[0], rows.shape[1]))


def run_scatter_rows_and_probs(
    tokens: Tensor,
    probs: Tensor,
    slot_row: Tensor,
    num_rows: int,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`scatter_rows_and_probs` without a graph."""
    if tokens.is_cuda:
        from isozyme.moe.kernels.triton_rows import launch_scatter_rows

        return launch_scatter_rows(tokens, probs, slot_row, num_rows, counts, ends)
    return scatter_rows_twin(tokens, slot_row, num_rows), scatter_probs_twin(probs, slot_row, num_rows)


scatter_rows_and_probs_op = torch.library.custom_op(
    "isozyme::scatter_rows_and_probs", run_scatter_rows_and_probs, mutates_args=()
)


@scatter_rows_and_probs_op.register_fake
@no_type_check
def _(
    tokens: Tensor,
    probs: Tensor,
    slot_row: Tensor,
    num_rows: int,
    counts: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    del slot_row, counts, ends
    return tokens.new_empty((num_rows, tokens.shape[1])), probs.new_empty(num_rows)


def run_gather_rows_and_probs(rows: Tensor, by_row: Tensor, slot_row: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_rows`, and for each slot the value of its row in `by_row` `[R]`; zero for a slot without one.

    It exists as the gradient of `scatter_rows_and_probs` and has none itself.
    """
    if rows.is_cuda:
        from isozyme.moe.kernels.triton_rows import launch_gather_rows

        return launch_gather_rows(rows, by_row, slot_row)
    return gather_rows_twin(rows, slot_row), gather_probs_twin(by_row, slot_row)


gather_rows_and_probs_op = torch.library.custom_op(
    "isozyme::gather_rows_and_probs", run_gather_rows_and_probs, mutates_args=()
)


@gather_rows_and_probs_op.register_fake
@no_type_check
def _(rows: Tensor, by_row: Tensor, slot_row: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty((slot_row.shape[0], rows.shape[1])), by_row.new_empty(slot_row.shape)


@no_type_check
def _save_scatter(ctx, inputs, output):
    del output
    _, slot_row, _, counts, ends = inputs
    ctx.save_for_backward(slot_row, counts, ends)


@no_type_check
def _save_gather(ctx, inputs, output):
    del output
    rows, slot_row, counts, ends = inputs
    ctx.save_for_backward(slot_row, counts, ends)
    ctx.num_rows = rows.shape[0]


@no_type_check
def _save_both(ctx, inputs, output):
    del output
    ctx.save_for_backward(inputs[2])


@no_type_check
def _both_backward(gather, ctx, d_rows, d_by_row):
    grads = gather(d_rows.contiguous(), d_by_row.contiguous(), *ctx.saved_tensors)
    return *grads, None, None, None, None


@no_type_check
def _scatter_backward(gather, ctx, grad):
    return gather(grad.contiguous(), *ctx.saved_tensors), None, None, None, None


@no_type_check
def _gather_backward(scatter, ctx, grad):
    slot_row, counts, ends = ctx.saved_tensors
    return scatter(grad.contiguous(), slot_row, ctx.num_rows, counts, ends), None, None, None


scatter_rows_op.register_autograd(partial(_scatter_backward, gather_rows_op), setup_context=_save_scatter)
gather_rows_op.register_autograd(partial(_gather_backward, scatter_rows_op), setup_context=_save_gather)
scatter_rows_and_probs_op.register_autograd(
    partial(_both_backward, gather_rows_and_probs_op), setup_context=_save_both
)
_eager_scatter_rows = eager(run_scatter_rows, _save_scatter, partial(_scatter_backward, run_gather_rows))
_eager_gather_rows = eager(run_gather_rows, _save_gather, partial(_gather_backward, run_scatter_rows))
_eager_both = eager(
    run_scatter_rows_and_probs, _save_both, partial(_both_backward, run_gather_rows_and_probs)
)


def scatter_rows(
    tokens: Float[Tensor, "T H"],
    slot_row: Int[Tensor, "T K"],
    num_rows: int,
    counts: Int[Tensor, "E"] | None = None,
    ends: Int[Tensor, "E"] | None = None,
) -> Float[Tensor, "R H"]:
    """Copy each token's row to the rows of its kept slots.

    Args:
        tokens: what is copied.
        slot_row: int32 from `row_map`, -1 for a slot that is not kept.
        num_rows: R, the rows to allocate; at least every index in `slot_row` plus one.
        counts: int32 from `row_map(align > 1)`; given with `ends`, the padding rows become zero.
        ends: int32, the padded ends from the same call.

    Returns:
        Rows that belong to no slot are zero up to the last end where `ends` is given, and unspecified
        elsewhere.
    """
    rows: Tensor = direct(scatter_rows_op, _eager_scatter_rows)(tokens, slot_row, num_rows, counts, ends)
    return rows


def gather_rows(
    rows: Float[Tensor, "R H"],
    slot_row: Int[Tensor, "T K"],
    counts: Int[Tensor, "E"] | None = None,
    ends: Int[Tensor, "E"] | None = None,
) -> Float[Tensor, "T H"]:
    """Add up, in at least fp32 and in slot order, the rows of each token's kept slots.

    Args:
        rows: expert-major.
        slot_row: int32 from `row_map`.
        counts: int32 from `row_map(align > 1)`; given with `ends`, the gradient of padding rows is zero
            rather than unspecified.
        ends: int32 from the same call.

    Returns:
        In the dtype of `rows`; zeros for a token without kept slots.
    """
    tokens: Tensor = direct(gather_rows_op, _eager_gather_rows)(rows, slot_row, counts, ends)
    return tokens


def scatter_rows_and_probs(
    tokens: Float[Tensor, "T H"],
    probs: Float[Tensor, "T K"],
    slot_row: Int[Tensor, "T K"],
    num_rows: int,
    counts: Int[Tensor, "E"] | None = None,
    ends: Int[Tensor, "E"] | None = None,
) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R"]]:
    """`scatter_rows`, and the combine weight of each row with it.

    Args:
        tokens: what is copied.
        probs: combine weights, at least fp32.
        slot_row: as for `scatter_rows`, and so are the others.

    Returns:
        Rows and weights. Both are zero in padding rows if `ends` is given, and unspecified in rows that are
        neither filled nor padding. The gradient is `run_gather_rows_and_probs`.
    """
    given = (tokens, probs, slot_row, num_rows, counts, ends)
    both: tuple[Tensor, Tensor] = direct(scatter_rows_and_probs_op, _eager_both)(*given)
    return both
