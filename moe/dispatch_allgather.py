"""Dispatch by all-gather: every rank sees every token of the group and picks the rows of its own experts.

It moves E/K times more than needed but needs no sorting of what arrives; it suits few ranks, large K, and
tests: it is the plain twin of the all-to-all dispatcher.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.grouping import ArrivalDispatcher
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Arrival, Routing
from isozyme.parallel.collectives import gather_from_group, reduce_scatter_to_group


class AllGatherDispatcher(ArrivalDispatcher):
    """Gathers tokens and routing, and returns results by reduce-scatter.

    Ranks may hold any number of tokens, also none. Waits for the host once, for the number of tokens of each
    rank (grouping waits once more, for the counts). Bytes received per rank: the tokens of all others, in
    both directions; partial results are added up over ranks in at least fp32.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement

    def send(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Arrival:
        """Gather the group's tokens; of their slots, those of this rank's experts are kept."""
        group = self.placement.communicator
        number = torch.tensor([tokens.shape[0]], device=tokens.device)
        sizes = tuple(int(size) for size in group.all_gather(number).tolist())
        mine = self.placement.only_local(self._gather_routing(routing, sizes))
        return Arrival(
            rows=gather_from_group(tokens, group, sizes),
            expert_ids=mine.topk_ids,
            kept=mine.kept,
            probs=mine.topk_probs,
            num_experts=mine.num_experts,
            handle=sizes,
        )

    def bring_back(self, results: Float[Tensor, "N H"], arrival: Arrival) -> Float[Tensor, "T H"]:
        """Add up the results of every token over the ranks; keep this rank's tokens."""
        wide = torch.promote_types(results.dtype, torch.float32)
        total = reduce_scatter_to_group(results.to(wide), self.placement.communicator, arrival.handle)
        return total.to(results.dtype)

    def _gather_routing(self, routing: Routing, sizes: tuple[int, ...]) -> Routing:
        """The routing of all tokens of the group, in rank order; ids and `kept` travel as one tensor."""
        group = self.placement.communicator
        marked: Int[Tensor, "T K"] = torch.where(
            routing.kept, routing.topk_ids, torch.full_like(routing.topk_ids, -1)
        )
        ids = group.all_gather(marked, sizes)
        return Routing(
            topk_ids=ids.clamp(min=0),
            topk_probs=gather_from_group(routing.topk_probs, group, sizes),
            kept=ids >= 0,
            num_experts=routing.num_experts,
        )
