"""Dispatch by all-to-all: each rank sends exactly the rows that other ranks' experts need.

permute (expert-major, so rank-major) → exchange counts → exchange rows and weights → sort the chunks that
arrived from (rank, expert) to (expert, rank) order; combine undoes it step by step. Both come in two halves,
so that other work can overlap with the exchange, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.permute import (
    RowMap,
    SlotMap,
    chunk_map,
    permute,
    permute_probs,
    reorder,
    restore,
    sort_slots,
    unpermute,
)
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Dispatched, Routing
from isozyme.parallel.collectives import InFlight, all_to_all_finish, all_to_all_start


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """What both sides know after the counts were exchanged, from this rank's view."""

    input_splits: tuple[int, ...]
    """Rows that this rank sends to each rank."""
    output_splits: tuple[int, ...]
    """Rows that it receives from each rank."""
    received: Int[Tensor, "ranks E_local"]
    """Rows that it receives from each rank for each of its experts, int64, on the device."""
    host_counts: tuple[int, ...]
    """Rows of each of its experts."""


@dataclass(frozen=True, kw_only=True)
class _Handle:
    slots: SlotMap
    chunks: RowMap
    exchange: _Exchange


@dataclass(frozen=True, kw_only=True)
class DispatchInFlight:
    """A dispatch that has been started: what `dispatch_finish` needs."""

    rows: InFlight
    probs: InFlight
    slots: SlotMap
    exchange: _Exchange


@dataclass(frozen=True, kw_only=True)
class CombineInFlight:
    """A combine that has been started: what `combine_finish` needs."""

    rows: InFlight
    slots: SlotMap


class AllToAllDispatcher:
    """Sends one row for each kept slot, and one weight.

    Every rank takes part in every exchange, forward and backward, whatever its counts: a rank without rows
    sends and receives tensors of zero rows that stay in the graph. Waits for the host once, for the splits.
    Bytes sent per rank and direction: (rows for other ranks) * H * itemsize, and the weights.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement

    def dispatch(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Dispatched:
        """Send every kept slot's row to the rank of its expert (with ETP, to all ranks that share it)."""
        return self.dispatch_finish(self.dispatch_start(tokens, routing))

    def dispatch_start(self, tokens: Float[Tensor, "T H"], routing: Routing) -> DispatchInFlight:
        """Exchange the counts and start to send; what is computed before the finish overlaps with it."""
        spread = self.placement.by_rank(routing)
        exchange = self._exchange_counts(spread.local_tokens_per_expert())
        slots = sort_slots(spread, sum(exchange.input_splits))
        group = self.placement.communicator
        out, into = exchange.output_splits, exchange.input_splits
        return DispatchInFlight(
            rows=all_to_all_start(permute(tokens, slots), group, out, into),
            probs=all_to_all_start(permute_probs(spread.topk_probs, slots), group, out, into),
            slots=slots,
            exchange=exchange,
        )

    def dispatch_finish(self, in_flight: DispatchInFlight) -> Dispatched:
        """Wait for the rows, and sort them by expert."""
        exchange = in_flight.exchange
        chunks = chunk_map(exchange.received, sum(exchange.output_splits))
        return Dispatched(
            rows=reorder(all_to_all_finish(in_flight.rows), chunks),
            probs=reorder(all_to_all_finish(in_flight.probs), chunks),
            tokens_per_expert=exchange.received.sum(0),
            num_rows=sum(exchange.output_splits),
            host_counts=exchange.host_counts,
            handle=_Handle(slots=in_flight.slots, chunks=chunks, exchange=exchange),
        )

    def combine(self, rows: Float[Tensor, "R H"], dispatched: Dispatched) -> Float[Tensor, "T H"]:
        """Send the rows back where they came from, and add up each token's."""
        return self.combine_finish(self.combine_start(rows, dispatched))

    def combine_start(self, rows: Float[Tensor, "R H"], dispatched: Dispatched) -> CombineInFlight:
        """Start to send the rows back."""
        handle: _Handle = dispatched.handle
        back = all_to_all_start(
            restore(rows, handle.chunks),
            self.placement.communicator,
            output_splits=handle.exchange.input_splits,
            input_splits=handle.exchange.output_splits,
        )
        return CombineInFlight(rows=back, slots=handle.slots)

    def combine_finish(self, in_flight: CombineInFlight) -> Float[Tensor, "T H"]:
        """Wait for the rows, and add up each token's."""
        return unpermute(all_to_all_finish(in_flight.rows), in_flight.slots)

    def _exchange_counts(self, counts: Int[Tensor, "experts"]) -> _Exchange:
        """Tell every rank how many rows come for each of its experts, and fetch all numbers at once."""
        group = self.placement.communicator
        sent = rearrange(counts, "(rank expert) -> rank expert", rank=group.size)
        received = group.all_to_all(sent)
        numbers = torch.cat([sent.sum(1), received.sum(1), received.sum(0)]).tolist()
        return _Exchange(
            input_splits=tuple(numbers[: group.size]),
            output_splits=tuple(numbers[group.size : 2 * group.size]),
            received=received,
            host_counts=tuple(numbers[2 * group.size :]),
        )
