"""Grouping what arrived by expert, and back: the half of dispatch that is local to a rank.

A dispatcher is a way to `send` tokens and to `bring_back` results. Sorting the rows by expert is the same for
all of them, and it is separate so that a fused backend can take the rows as they arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from isozyme.moe.host_copy import HostCopy
from isozyme.moe.permute import SlotMap, permute_both, sort_slots, unpermute
from isozyme.moe.types import Arrival, Dispatched, Routing


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The handle of a grouping: what arrived, and the expert-major order of its slots."""

    arrival: Arrival
    slots: SlotMap


def group_rows(arrival: Arrival) -> Dispatched:
    """Sort arrived rows by expert, padding-free and stable."""
    local = Routing(
        topk_ids=arrival.expert_ids,
        topk_probs=arrival.probs,
        kept=arrival.kept,
        num_experts=arrival.num_experts,
    )
    slots = sort_slots(local, arrival.kept.numel())
    counts = arrival.host_counts
    if counts is None:
        counts = tuple(HostCopy(slots.counts).wait().tolist())
    slots = replace(slots, num_rows=sum(counts))
    rows, probs = permute_both(arrival.rows, arrival.probs, slots)
    return Dispatched(
        rows=rows,
        probs=probs,
        tokens_per_expert=slots.counts,
        num_rows=slots.num_rows,
        host_counts=counts,
        handle=Grouped(arrival=arrival, slots=slots),
    )


def ungroup_rows(rows: Float[Tensor, "R H"], dispatched: Dispatched) -> Float[Tensor, "N H"]:
    """For each arrived row the sum of its slots' results, in the order of arrival."""
    grouped: Grouped = dispatched.handle
    return unpermute(rows, grouped.slots)


class ArrivalDispatcher(ABC):
    """A dispatcher that can stop at what arrived: `dispatch` is `send` and group, `combine` the inverse.

    `send` and `bring_back` come in two halves each. What is computed between a start and its finish overlaps
    with the exchange, and in backward again: there finish starts the conjugate exchange and start waits for
    it, and autograd runs what was computed later first. All ranks of the group call all four together.
    """

    @abstractmethod
    def send_start(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Any:
        """Start to send every kept slot's row to the rank of its expert; `send_finish` takes the result."""

    @abstractmethod
    def send_finish(self, in_flight: Any) -> Arrival:
        """Wait for the rows."""

    @abstractmethod
    def bring_back_start(self, results: Float[Tensor, "N H"], arrival: Arrival) -> Any:
        """Start to return one result for each arrived row; `bring_back_finish` takes the result."""

    @abstractmethod
    def bring_back_finish(self, in_flight: Any) -> Float[Tensor, "T H"]:
        """Wait for the results, and add them up by token; zeros for a token without kept slots."""

    def send(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Arrival:
        """Send every kept slot's row to the rank of its expert (with ETP, to all ranks that share it)."""
        return self.send_finish(self.send_start(tokens, routing))

    def bring_back(self, results: Float[Tensor, "N H"], arrival: Arrival) -> Float[Tensor, "T H"]:
        """Return one result for each arrived row, and add them up by token."""
        return self.bring_back_finish(self.bring_back_start(results, arrival))

    def dispatch(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Dispatched:
        """Send every kept slot's row, and group what arrives by expert."""
        return group_rows(self.send(tokens, routing))

    def combine(self, rows: Float[Tensor, "R H"], dispatched: Dispatched) -> Float[Tensor, "T H"]:
        """Add up the rows of each arrived row, return them, and add up each token's."""
        grouped: Grouped = dispatched.handle
        return self.bring_back(ungroup_rows(rows, dispatched), grouped.arrival)
