"""Dispatch by all-to-all: each rank sends exactly the rows that other ranks' experts need.

sort (expert-major, so rank-major) → exchange counts, and permute meanwhile → exchange rows and weights →
group what arrived by expert; combine undoes it step by step. Both come in two halves, so that other work can
overlap with the exchange, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.grouping import ArrivalDispatcher
from isozyme.moe.host_copy import HostCopy
from isozyme.moe.kernels.chunk_experts import chunk_experts
from isozyme.moe.permute import SlotMap, first_rows, permute_ahead, sort_slots, unpermute
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Arrival, Routing
from isozyme.parallel.collectives import InFlight, all_to_all_start, finish


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
class _Sending:
    """Rows on their way there: what `send_finish` needs."""

    rows: InFlight
    probs: InFlight
    handle: _Handle


@dataclass(frozen=True, kw_only=True)
class _Returning:
    """Results on their way back: what `bring_back_finish` needs."""

    rows: InFlight
    slots: SlotMap


class AllToAllDispatcher(ArrivalDispatcher):
    """Sends one row for each kept slot, and one weight.

    Every rank takes part in every exchange, forward and backward, whatever its counts: a rank without rows
    sends and receives tensors of zero rows that stay in the graph. Waits for the host once, for the splits;
    meanwhile the device permutes. Bytes sent per rank and direction: (rows for other ranks) * H * itemsize,
    and the weights.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement

    def send_start(self, tokens: Float[Tensor, "T H"], routing: Routing) -> _Sending:
        """Exchange the counts, permute, and start to send."""
        spread = self.placement.by_rank(routing)
        slots = sort_slots(spread, spread.kept.numel())
        counts = self._exchange_counts(slots.counts)
        ahead = permute_ahead(tokens, spread.topk_probs, slots)
        exchange = counts()
        slots = replace(slots, num_rows=sum(exchange.input_splits))
        rows, probs = first_rows(ahead, tokens, spread.topk_probs, slots)
        group = self.placement.communicator
        out, into = exchange.output_splits, exchange.input_splits
        return _Sending(
            rows=all_to_all_start(rows, group, out, into),
            probs=all_to_all_start(probs, group, out, into),
            handle=_Handle(slots=slots, exchange=exchange),
        )

    def send_finish(self, in_flight: _Sending) -> Arrival:
        """Wait for the rows: rank-major, and each rank's by expert, then token."""
        exchange = in_flight.handle.exchange
        received, total = exchange.received, sum(exchange.output_splits)
        ids = chunk_experts(received, total)
        return Arrival(
            rows=finish(in_flight.rows),
            expert_ids=rearrange(ids, "n -> n 1"),
            kept=torch.ones((total, 1), dtype=torch.bool, device=ids.device),
            probs=rearrange(finish(in_flight.probs), "n -> n 1"),
            num_experts=received.shape[1],
            host_counts=exchange.host_counts,
            handle=in_flight.handle,
        )

    def bring_back_start(self, results: Float[Tensor, "N H"], arrival: Arrival) -> _Returning:
        """Start to send results, in the order of arrival, back."""
        handle: _Handle = arrival.handle
        back = all_to_all_start(
            results,
            self.placement.communicator,
            output_splits=handle.exchange.input_splits,
            input_splits=handle.exchange.output_splits,
        )
        return _Returning(rows=back, slots=handle.slots)

    def bring_back_finish(self, in_flight: _Returning) -> Float[Tensor, "T H"]:
        """Wait for the rows, and add up each token's."""
        return unpermute(finish(in_flight.rows), in_flight.slots)

    def _exchange_counts(self, counts: Int[Tensor, "experts"]) -> Callable[[], _Exchange]:
        """Tell every rank how many rows come for each of its experts; the function waits for the answers."""
        group = self.placement.communicator
        sent = rearrange(counts, "(rank expert) -> rank expert", rank=group.size)
        received = group.all_to_all(sent)
        numbers = HostCopy(torch.stack([sent, received]))

        def answers() -> _Exchange:
            there, here = numbers.wait().tolist()  # the device idles from here on: no tensors of few numbers
            return _Exchange(
                input_splits=tuple(map(sum, there)),
                output_splits=tuple(map(sum, here)),
                received=received,
                host_counts=tuple(map(sum, zip(*here, strict=True))),
            )

        return answers
