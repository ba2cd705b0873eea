"""Dispatch where one rank holds all experts: a permutation, and nobody to talk to."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from isozyme.moe.permute import permute, permute_probs, sort_slots, unpermute
from isozyme.moe.types import Dispatched, Routing


class LocalDispatcher:
    """Sorts this rank's rows by expert. Waits for the host once, for the counts."""

    def dispatch(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Dispatched:
        """Copy every kept slot's token to its expert's rows."""
        counts = tuple(int(count) for count in routing.local_tokens_per_expert().tolist())
        slots = sort_slots(routing, sum(counts))
        return Dispatched(
            rows=permute(tokens, slots),
            probs=permute_probs(routing.topk_probs, slots),
            tokens_per_expert=slots.counts,
            num_rows=slots.num_rows,
            host_counts=counts,
            handle=slots,
        )

    def combine(self, rows: Float[Tensor, "R H"], dispatched: Dispatched) -> Float[Tensor, "T H"]:
        """Add up each token's rows."""
        return unpermute(rows, dispatched.handle)
