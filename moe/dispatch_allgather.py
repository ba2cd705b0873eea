"""Dispatch by all-gather: every rank sees every token of the group and picks the rows of its own experts.

It moves E/K times more than needed but needs no sorting of what arrives; it suits few ranks, large K, and
tests: it is the plain twin of the all-to-all dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.grouping import ArrivalDispatcher
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Arrival, Routing
from isozyme.parallel.collectives import (
    InFlight,
    finish,
    gather_from_group_start,
    reduce_scatter_to_group_start,
)
from isozyme.parallel.communicator import Pending


@dataclass(frozen=True, kw_only=True)
class _Gathering:
    """Tokens and routing on their way: what `send_finish` needs."""

    ids: Pending
    """Expert ids; -1 for a slot that is not kept."""
    probs: InFlight
    rows: InFlight
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Adding:
    """Results on their way back: what `bring_back_finish` needs."""

    total: InFlight
    dtype: torch.dtype


class AllGatherDispatcher(ArrivalDispatcher):
    """Gathers tokens and routing, and returns results by reduce-scatter.

    Bytes received per rank: the tokens of all others, in both directions. Partial results are added up over
    ranks in at least fp32, which doubles the bytes of bf16; for two ranks in their own type, where one sum is
    rounded once either way.

    Args:
        placement: which rank holds which expert.
        equal_tokens: whether all ranks always hold equally many tokens, as those of a decoder do: then
            nothing waits for the host (but grouping, for the counts). Otherwise they may hold any number,
            also none, and tell each other how many.
    """

    def __init__(self, placement: ExpertPlacement, *, equal_tokens: bool = False) -> None:
        self.placement = placement
        self.equal_tokens = equal_tokens

    def send_start(self, tokens: Float[Tensor, "T H"], routing: Routing) -> _Gathering:
        """Start to gather the group's tokens and their routing, in rank order."""
        group = self.placement.communicator
        sizes = self._sizes(tokens)
        marked: Int[Tensor, "T K"] = torch.where(routing.kept, routing.topk_ids, -1)
        return _Gathering(
            ids=group.all_gather_async(marked, sizes),  # and `kept`, as one tensor
            probs=gather_from_group_start(routing.topk_probs, group, sizes),
            rows=gather_from_group_start(tokens, group, sizes),
            sizes=sizes,
        )

    def send_finish(self, in_flight: _Gathering) -> Arrival:
        """Wait for the tokens; of their slots, those of this rank's experts are kept."""
        local, mine = self.placement.local_slots(in_flight.ids.wait())
        return Arrival(
            expert_ids=local,
            kept=mine,
            probs=finish(in_flight.probs),
            rows=finish(in_flight.rows),
            num_experts=self.placement.num_local_experts,
            handle=in_flight.sizes,
        )

    def bring_back_start(self, results: Float[Tensor, "N H"], arrival: Arrival) -> _Adding:
        """Start to add up the results of every token over the ranks."""
        group = self.placement.communicator
        wide = torch.promote_types(results.dtype, torch.float32) if group.size > 2 else results.dtype
        total = reduce_scatter_to_group_start(results.to(wide), group, arrival.handle)
        return _Adding(total=total, dtype=results.dtype)

    def bring_back_finish(self, in_flight: _Adding) -> Float[Tensor, "T H"]:
        """Wait for the sums of this rank's tokens."""
        return finish(in_flight.total).to(in_flight.dtype)

    def _sizes(self, tokens: Tensor) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        group = self.placement.communicator
        if self.equal_tokens:
            return (tokens.shape[0],) * group.size
        number = torch.tensor([tokens.shape[0]], device=tokens.device)
        return tuple(int(size) for size in group.all_gather(number).tolist())
