"""Dispatch by all-to-all with buffers of fixed size: every rank sends `capacity` rows to every expert.

Shapes are the same in every step, so that no counts are exchanged and nothing waits for the host. The price
is the filler: rows of zeros with weight 0, whose results and gradients are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from isozyme.core.errors import UsageError
from isozyme.moe.grouping import ArrivalDispatcher
from isozyme.moe.permute import RowMap, reorder, restore
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Arrival, Routing
from isozyme.parallel.collectives import InFlight, all_to_all_start, finish


@dataclass(frozen=True, kw_only=True)
class _Sending:
    """Buffers on their way there: what `send_finish` needs."""

    rows: InFlight
    probs: InFlight
    by_token: RowMap


@dataclass(frozen=True, kw_only=True)
class _Returning:
    """Buffers on their way back: what `bring_back_finish` needs."""

    rows: InFlight
    by_token: RowMap


class PaddedAllToAllDispatcher(ArrivalDispatcher):
    """Sends exactly `capacity` rows to each expert, real ones first, and as many back.

    The result equals that of the ragged exchange. Filler counts as rows: every expert has ranks * capacity;
    how many slots were routed and dropped is in `RouterStats`.

    Args:
        placement: which rank holds which expert.
        capacity: rows that each rank sends to each expert. It must be the same on all ranks of the group
            (so they must hold equally many windows), and no less than any expert's kept slots on any rank.
    """

    def __init__(self, placement: ExpertPlacement, capacity: int) -> None:
        self.placement = placement
        self.capacity = capacity

    def send_start(self, tokens: Float[Tensor, "T H"], routing: Routing) -> _Sending:
        """Start to send every kept slot's row, filled up to the capacity.

        Raises:
            UsageError: if an expert keeps more slots than the capacity (on CUDA a device-side assertion,
                because nothing here waits for the device).
        """
        spread = self.placement.by_rank(routing)
        by_token, by_slot = self._buffer_maps(spread)
        return _Sending(
            rows=self._exchange(reorder(tokens, by_token)),
            probs=self._exchange(reorder(spread.topk_probs.flatten(), by_slot)),
            by_token=by_token,
        )

    def send_finish(self, in_flight: _Sending) -> Arrival:
        """Wait for the buffers: rank-major, and each rank's by expert, then place."""
        rows, ranks = finish(in_flight.rows), self.placement.communicator.size
        experts = torch.arange(self.placement.num_local_experts, device=rows.device)
        ids = repeat(experts, "e -> (r e c) 1", r=ranks, c=self.capacity)
        return Arrival(
            rows=rows,
            expert_ids=ids,
            kept=torch.ones_like(ids, dtype=torch.bool),
            probs=rearrange(finish(in_flight.probs), "n -> n 1"),
            num_experts=len(experts),
            host_counts=(ranks * self.capacity,) * len(experts),
            handle=in_flight.by_token,
        )

    def bring_back_start(self, results: Float[Tensor, "N H"], arrival: Arrival) -> _Returning:
        """Start to send the buffers back."""
        return _Returning(rows=self._exchange(results), by_token=arrival.handle)

    def bring_back_finish(self, in_flight: _Returning) -> Float[Tensor, "T H"]:
        """Wait for the buffers, and add up each token's rows; what experts made of filler is not read."""
        return restore(finish(in_flight.rows), in_flight.by_token)

    def _exchange(self, x: Tensor) -> InFlight:
        group = self.placement.communicator
        share = (self.placement.num_local_experts * self.capacity,) * group.size
        return all_to_all_start(x, group, output_splits=share, input_splits=share)

    def _buffer_maps(self, routing: Routing) -> tuple[RowMap, RowMap]:
        """From tokens, and from flat slots, to buffer rows `(rank, expert, place)`, without the host."""
        experts, topk = routing.num_experts, routing.topk
        key = torch.where(routing.kept, routing.topk_ids, experts).flatten()
        sizes = torch.zeros(experts + 1, dtype=torch.int64, device=key.device)
        sizes.scatter_add_(0, key, torch.ones_like(key))
        self._check(sizes[:-1])
        ordered = torch.sort(key, stable=True)
        within = torch.arange(key.numel(), device=key.device) - (sizes.cumsum(0) - sizes)[ordered.values]
        total = experts * self.capacity
        kept = ordered.values < experts
        place = torch.where(kept, ordered.values * self.capacity + within, total)
        slot = torch.full((total + 1,), -1, dtype=torch.int64, device=key.device)
        slot = slot.scatter_(0, place, ordered.indices)[:-1]  # the last place takes what is not kept
        places = torch.empty_like(key).scatter_(0, ordered.indices, torch.where(kept, place, -1))
        token = torch.where(slot >= 0, slot // max(topk, 1), -1)
        return (
            RowMap(source=token, places=rearrange(places, "(t k) -> t k", k=topk)),
            RowMap(source=slot, places=rearrange(places, "s -> s 1")),
        )

    def _check(self, sizes: Tensor) -> None:
        rule = f"an expert keeps more slots of one rank than the buffer has rows: capacity={self.capacity}"
        fits = (sizes <= self.capacity).all()
        if sizes.is_cuda:
            torch._assert_async(fits, rule)
        elif not fits:
            raise UsageError(f"{rule}; the fullest has {int(sizes.max())}. Apply the capacity first.")
