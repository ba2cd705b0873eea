"""Dispatch where one rank holds all experts: nobody to talk to."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from isozyme.moe.grouping import ArrivalDispatcher
from isozyme.moe.types import Arrival, Routing


class LocalDispatcher(ArrivalDispatcher):
    """Everything has arrived. Grouping waits for the host once, for the counts; a fused backend does not."""

    def send_start(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Arrival:
        """The tokens themselves."""
        return Arrival(
            rows=tokens,
            expert_ids=routing.topk_ids,
            kept=routing.kept,
            probs=routing.topk_probs,
            num_experts=routing.num_experts,
        )

    def send_finish(self, in_flight: Arrival) -> Arrival:
        """The tokens themselves."""
        return in_flight

    def bring_back_start(self, results: Float[Tensor, "N H"], arrival: Arrival) -> Float[Tensor, "N H"]:
        """The results themselves."""
        del arrival
        return results

    def bring_back_finish(self, in_flight: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
        """The results themselves."""
        return in_flight
