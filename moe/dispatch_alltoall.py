"""Dispatch by all-to-all: each rank sends exactly the rows that other ranks' experts need.

permute (expert-major, so rank-major) → exchange counts → exchange rows and weights → group what arrived by
expert; combine undoes it step by step. Both come in two halves, so that other work can overlap with the
exchange, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.grouping import ArrivalDispatcher, group_rows, ungroup_rows
from isozyme.moe.permute import SlotMap, permute, permute_probs, sort_slots, unpermute
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Arrival, Dispatched, Routing
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
    exchange: _Exchange


@dataclass(frozen=True, kw_only=True)
class DispatchInFlight:
    """A dispatch that has been started: what `send_finish` or `dispatch_finish` needs."""

    rows: InFlight
    probs: InFlight
    handle: _Handle


@dataclass(frozen=True, kw_only=True)
class CombineInFlight:
    """A combine that has been started: what `bring_back_finish` or `combine_finish` needs."""

    rows: InFlight
    slots: SlotMap


class AllToAllDispatcher(ArrivalDispatcher):
    """Sends one row for each kept slot, and one weight.

    Every rank takes part in every exchange, forward and backward, whatever its counts: a rank without rows
    sends and receives tensors of zero rows that stay in the graph. Waits for the host once, for the splits.
    Bytes sent per rank and direction: (rows for other ranks) * H * itemsize, and the weights.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement

    def send(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Arrival:
        """Send every kept slot's row to the rank of its expert (with ETP, to all ranks that share it)."""
        return self.send_finish(self.dispatch_start(tokens, routing))

    def bring_back(self, results: Float[Tensor, "N H"], arrival: Arrival) -> Float[Tensor, "T H"]:
        """Send the results back where the rows came from, and add up each token's."""
        return self.combine_finish(self.bring_back_start(results, arrival))

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
            handle=_Handle(slots=slots, exchange=exchange),
        )

    def send_finish(self, in_flight: DispatchInFlight) -> Arrival:
        """Wait for the rows: rank-major, and each rank's by expert, then token."""
        exchange = in_flight.handle.exchange
        received, total = exchange.received, sum(exchange.output_splits)
        experts = repeat(
            torch.arange(received.shape[1], device=received.device), "e -> (r e)", r=received.shape[0]
        )
        ids = torch.repeat_interleave(experts, received.flatten(), output_size=total)
        return Arrival(
            rows=all_to_all_finish(in_flight.rows),
            expert_ids=rearrange(ids, "n -> n 1"),
            kept=torch.ones((total, 1), dtype=torch.bool, device=ids.device),
            probs=rearrange(all_to_all_finish(in_flight.probs), "n -> n 1"),
            num_experts=received.shape[1],
            host_counts=exchange.host_counts,
            handle=in_flight.handle,
        )

    def dispatch_finish(self, in_flight: DispatchInFlight) -> Dispatched:
        """Wait for the rows, and group them by expert."""
        return group_rows(self.send_finish(in_flight))

    def bring_back_start(self, results: Float[Tensor, "N H"], arrival: Arrival) -> CombineInFlight:
        """Start to send results, in the order of arrival, back."""
        handle: _Handle = arrival.handle
        back = all_to_all_start(
            results,
            self.placement.communicator,
            output_splits=handle.exchange.input_splits,
            input_splits=handle.exchange.output_splits,
        )
        return CombineInFlight(rows=back, slots=handle.slots)

    def combine_start(self, rows: Float[Tensor, "R H"], dispatched: Dispatched) -> CombineInFlight:
        """Start to send the rows, grouped by expert, back."""
        return self.bring_back_start(ungroup_rows(rows, dispatched), dispatched.handle.arrival)

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
