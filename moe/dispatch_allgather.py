"""Dispatch by all-gather: every rank sees every token of the group and picks the rows of its own experts.

It moves E/K times more than needed but needs no sorting of what arrives; it suits few ranks, large K, and
tests: it is the plain twin of the all-to-all dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.permute import SlotMap, permute, permute_probs, sort_slots, unpermute
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Dispatched, Routing
from isozyme.parallel.collectives import gather_from_group, reduce_scatter_to_group


@dataclass(frozen=True, kw_only=True)
class _Handle:
    slots: SlotMap
    """Rows of this rank's experts among the tokens of the whole group."""
    sizes: tuple[int, ...]
    """Tokens of each rank."""


class AllGatherDispatcher:
    """Gathers tokens and routing, and returns results by reduce-scatter.

    Ranks may hold any number of tokens, also none. Waits for the host twice: for the number of tokens of each
    rank, and for the counts of this rank's experts. Bytes received per rank: the tokens of all others, in
    both directions; partial results are added up in at least fp32.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self.placement = placement

    def dispatch(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Dispatched:
        """Gather the group's tokens and keep the rows of this rank's experts."""
        group = self.placement.communicator
        number = torch.tensor([tokens.shape[0]], device=tokens.device)
        sizes = tuple(int(size) for size in group.all_gather(number).tolist())
        everything = gather_from_group(tokens, group, sizes)
        whole = self.placement.only_local(self._gather_routing(routing, sizes))
        counts = tuple(int(count) for count in whole.local_tokens_per_expert().tolist())
        slots = sort_slots(whole, sum(counts))
        return Dispatched(
            rows=permute(everything, slots),
            probs=permute_probs(whole.topk_probs, slots),
            tokens_per_expert=slots.counts,
            num_rows=slots.num_rows,
            host_counts=counts,
            handle=_Handle(slots=slots, sizes=sizes),
        )

    def combine(self, rows: Float[Tensor, "R H"], dispatched: Dispatched) -> Float[Tensor, "T H"]:
        """Add up the rows of every token of the group, and over the ranks; keep this rank's tokens."""
        handle: _Handle = dispatched.handle
        wide = torch.promote_types(rows.dtype, torch.float32)
        partial = unpermute(rows.to(wide), handle.slots)
        total = reduce_scatter_to_group(partial, self.placement.communicator, handle.sizes)
        return total.to(rows.dtype)

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
