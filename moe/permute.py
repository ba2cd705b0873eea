"""Local reordering of rows: by expert and back.

Every reordering is the same linear map, `out[m] = Σ_k x[index[m, k]]` with -1 for "nothing", and its gradient
is that map with the inverse table. So there is one autograd function, without atomics: sums run over the
slots of a token in slot order, in at least fp32, and are the same in every run.

Rows are padding-free and expert-major: sorted by expert, then token, then slot. Dropped slots have no row.
On CUDA, sorting, `permute` and `unpermute` run the kernels of `isozyme.moe.kernels`; what is written here is
their slow twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.kernels import direct
from isozyme.moe.kernels.row_map import row_map
from isozyme.moe.kernels.rows import (
    gather_rows,
    gather_rows_and_probs_op,
    run_gather_rows_and_probs,
    run_scatter_rows_and_probs,
    scatter_rows,
    scatter_rows_and_probs,
    scatter_rows_and_probs_op,
)
from isozyme.moe.types import Routing


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """A reordering of M rows into N rows, as two tables that are each other's inverse. -1 means no row.

    A source row may appear several times in the result (at most K), a result row has at most one source.
    """

    source: Int[Tensor, "N"]
    """Source row of each result row, int64; -1 for a row of zeros."""
    places: Int[Tensor, "M K"]
    """Result rows made from each source row, int64; -1 where there are fewer than K."""
    all_sourced: bool = False
    """Whether there is no -1 in `source` (saves a masking pass)."""


@dataclass(frozen=True, kw_only=True)
class SlotMap:
    """The expert-major order of this rank's kept slots, on the routing's device."""

    slot_row: Int[Tensor, "T K"]
    """Row of each slot; -1 for a slot that is not kept."""
    counts: Int[Tensor, "E"]
    """Rows of each expert, int64."""
    num_rows: int
    """N, the kept slots (or more, if nobody knows it yet: then the rows behind them are unspecified)."""

    @cached_property
    def row_slot(self) -> Int[Tensor, "N"]:
        """Flat slot, token * K + choice, of each row, int64."""
        places = self.slot_row.flatten().long()
        places = torch.where(places < 0, self.num_rows, places)  # one row more takes what is not kept
        slots = torch.arange(places.numel(), device=places.device)
        return torch.zeros(self.num_rows + 1, dtype=torch.int64, device=places.device).scatter_(
            0, places, slots
        )[:-1]

    @cached_property
    def row_token(self) -> Int[Tensor, "N"]:
        """Token of each row, int64."""
        return self.row_slot // max(self.slot_row.shape[1], 1)

    @property
    def by_token(self) -> RowMap:
        """Tokens to rows."""
        return RowMap(source=self.row_token, places=self.slot_row, all_sourced=True)

    @property
    def by_slot(self) -> RowMap:
        """Flat slots to rows."""
        places = rearrange(self.slot_row, "t k -> (t k) 1")
        return RowMap(source=self.row_slot, places=places, all_sourced=True)


class _Reorder(torch.autograd.Function):
    """`out[m] = Σ_k x[index[m, k]]`; the gradient is the same with the inverse table.

    `full` and `inverse_full` say that a table has no -1.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, full: bool, inverse_full: bool
    ) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.full = (full, inverse_full)
        return _gather_sum(x, index, full)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        index, inverse = ctx.saved_tensors
        full, inverse_full = ctx.full
        grad = _reorder(grads[0], inverse, index, inverse_full, full)
        return grad, None, None, None, None


def _reorder(x: Tensor, index: Tensor, inverse: Tensor, full: bool, inverse_full: bool) -> Tensor:
    return _Reorder.apply(x, index, inverse, full, inverse_full)  # type: ignore[no-untyped-call]


def _gather_sum(x: Tensor, index: Tensor, full: bool) -> Tensor:
    """Sum the rows of `x` that each row of `index` `[M, K]` names; never reads a row that is not named."""
    rows, choices = index.shape
    if x.shape[0] == 0 or choices == 0:
        return x.new_zeros((rows, *x.shape[1:]))
    if choices == 1:
        return _take(x, index[:, 0], full)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = _take(x, index[:, 0], full).to(wide)
    for choice in range(1, choices):
        total += _take(x, index[:, choice], full)
    return total.to(x.dtype)


def _take(x: Tensor, index: Tensor, full: bool) -> Tensor:
    if full:
        return x.index_select(0, index)
    missing = index < 0
    taken = x.index_select(0, index.clamp(min=0))
    return taken.masked_fill_(missing.view(-1, *(1,) * (x.ndim - 1)), 0)


def reorder(x: Float[Tensor, "M *rest"], rows: RowMap) -> Float[Tensor, "N *rest"]:
    """The rows of `x` in the order of the map; zeros where it names no source. The gradient is `restore`."""
    return _reorder(x, rows.source[:, None], rows.places, rows.all_sourced, False)


def restore(x: Float[Tensor, "N *rest"], rows: RowMap) -> Float[Tensor, "M *rest"]:
    """For each source row of the map, the sum of the rows made from it. The gradient is `reorder`."""
    return _reorder(x, rows.places, rows.source[:, None], False, rows.all_sourced)


def sort_slots(routing: Routing, num_rows: int | None = None) -> SlotMap:
    """Order the kept slots by expert, then token, then choice.

    Args:
        routing: this rank's routing. Slots that are not kept sort behind all others, so that they shift none.
        num_rows: the number of kept slots, or an upper bound, if the caller has one on the host; else it is
            fetched (one wait).
    """
    if routing.topk_ids.is_cuda:
        slot_row, counts, _ = row_map(routing.topk_ids, routing.kept, routing.num_experts, 1)
        total = int(counts.sum()) if num_rows is None else num_rows
        return SlotMap(slot_row=slot_row, counts=counts.long(), num_rows=total)
    ids, kept = routing.topk_ids.flatten(), routing.kept.flatten()
    counts = routing.local_tokens_per_expert()
    total = int(counts.sum()) if num_rows is None else num_rows
    key = torch.where(kept, ids, routing.num_experts).to(torch.int32)
    row_slot = torch.sort(key, stable=True).indices[:total]
    slot_row = torch.full_like(ids, -1, dtype=torch.int64)
    slot_row[row_slot] = torch.arange(total, device=ids.device)
    slot_row = torch.where(kept, slot_row, -1)
    return SlotMap(slot_row=slot_row.view_as(routing.topk_ids), counts=counts, num_rows=total)


def permute(tokens: Float[Tensor, "T H"], slots: SlotMap) -> Float[Tensor, "N H"]:
    """Copy each token to the rows of its kept slots. The gradient of a token is the sum over its rows."""
    if tokens.is_cuda:
        rows: Tensor = scatter_rows(tokens, slots.slot_row, slots.num_rows)
        return rows
    return reorder(tokens, slots.by_token)


def permute_probs(probs: Float[Tensor, "T K"], slots: SlotMap) -> Float[Tensor, "N"]:
    """The combine weight of each row. A slot that is not kept has gradient zero."""
    return reorder(probs.flatten(), slots.by_slot)


def permute_both(
    tokens: Float[Tensor, "T H"], probs: Float[Tensor, "T K"], slots: SlotMap
) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N"]]:
    """`permute` and `permute_probs`, on CUDA in one pass."""
    if tokens.is_cuda:
        both: tuple[Tensor, Tensor] = scatter_rows_and_probs(tokens, probs, slots.slot_row, slots.num_rows)
        return both
    return permute(tokens, slots), permute_probs(probs, slots)


@dataclass(frozen=True, kw_only=True)
class RowsAhead:
    """Permuted rows and weights, made before their number was known: as many as there are slots."""

    rows: Float[Tensor, "S H"]
    probs: Float[Tensor, "S"]


@torch.no_grad()
def permute_ahead(tokens: Float[Tensor, "T H"], probs: Float[Tensor, "T K"], slots: SlotMap) -> RowsAhead:
    """Queue `permute_both` while the host does not know the number of rows; `first_rows` takes it from there.

    `slots.num_rows` is an upper bound.
    """
    move = direct(scatter_rows_and_probs_op, run_scatter_rows_and_probs)
    rows, by_row = move(tokens, probs, slots.slot_row, slots.num_rows)
    return RowsAhead(rows=rows, probs=by_row)


def first_rows(
    ahead: RowsAhead, tokens: Float[Tensor, "T H"], probs: Float[Tensor, "T K"], slots: SlotMap
) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N"]]:
    """`permute_both` of the same tokens, of which the values exist already; now `slots.num_rows` is exact."""
    both: tuple[Tensor, Tensor] = _FirstRows.apply(tokens, probs, slots.slot_row, ahead, slots.num_rows)  # type: ignore[no-untyped-call]
    return both


class _FirstRows(torch.autograd.Function):
    """Connects rows that were made ahead to the graph. No gradient of the rows behind is ever made."""

    @staticmethod
    def forward(
        ctx: Any, _tokens: Tensor, _probs: Tensor, slot_row: Tensor, ahead: RowsAhead, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(slot_row)
        return ahead.rows[:num_rows], ahead.probs[:num_rows]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (slot_row,) = ctx.saved_tensors
        move = direct(gather_rows_and_probs_op, run_gather_rows_and_probs)
        d_tokens, d_probs = move(grads[0].contiguous(), grads[1].contiguous(), slot_row)
        return d_tokens, d_probs, None, None, None


def unpermute(rows: Float[Tensor, "N H"], slots: SlotMap) -> Float[Tensor, "T H"]:
    """Add up the rows of each token, in at least fp32 and in slot order; zeros for a token without rows."""
    if rows.is_cuda:
        tokens: Tensor = gather_rows(rows, slots.slot_row)
        return tokens
    return restore(rows, slots.by_token)
