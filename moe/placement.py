"""Which rank of a group holds which expert.

Dispatchers talk over the ranks ETP x EP. An expert lives on one EP coordinate, cut over ETP: each of its ETP
ranks needs the expert's rows and returns a partial result, which `combine` adds up like further slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Int
from torch import Tensor

from isozyme.core.errors import ConfigError, divisors
from isozyme.moe.types import Routing
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.process_groups import ProcessGroups


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """The experts of one layer over the ranks of one group.

    The group ranks of expert e are `(e // num_local_experts) * ep_stride + j * etp_stride` for j < etp.
    """

    num_experts: int
    communicator: Communicator
    """All ranks of ETP x EP that hold the experts together."""
    ep: int = 1
    etp: int = 1
    ep_stride: int = 1
    etp_stride: int = 1

    @staticmethod
    def of(groups: ProcessGroups, num_experts: int) -> ExpertPlacement:
        """The placement that a layout gives: contiguous experts on each EP coordinate.

        Raises:
            ConfigError: if EP does not divide the experts.
        """
        topology = groups.topology
        ep, etp = topology.size("ep"), topology.size("etp")
        if num_experts % ep:
            raise ConfigError(
                f"ep must divide num_experts: num_experts={num_experts}, ep={ep}; {num_experts} % {ep} = "
                f"{num_experts % ep}. Choose ep from {', '.join(map(str, divisors(num_experts)))}."
            )
        communicator = groups["etp", "ep"] if etp > 1 else groups["ep"]
        at = [topology.coordinates(rank) for rank in communicator.ranks]
        place = {(here["ep"], here["etp"]): index for index, here in enumerate(at)}
        return ExpertPlacement(
            num_experts=num_experts,
            communicator=communicator,
            ep=ep,
            etp=etp,
            ep_stride=place.get((1, 0), 1),
            etp_stride=place.get((0, 1), 1),
        )

    @property
    def num_local_experts(self) -> int:
        """E_local, the experts of one rank."""
        return self.num_experts // self.ep

    @property
    def first_local_expert(self) -> int:
        """Global id of this rank's first expert."""
        return self.communicator.rank // self.ep_stride % self.ep * self.num_local_experts

    def by_rank(self, routing: Routing) -> Routing:
        """The same routing to the experts numbered rank by rank, `group rank * E_local + local expert`.

        With ETP each slot becomes one slot for each of its expert's ranks: `[T, K * ETP]`.
        """
        if self.etp == 1:  # the ranks ascend with the EP coordinate, so the numbers are the same
            return routing
        local = self.num_local_experts
        member = torch.arange(self.etp, device=routing.topk_ids.device) * self.etp_stride
        rank = routing.topk_ids[:, :, None] // local * self.ep_stride + member
        ids = rank * local + routing.topk_ids[:, :, None] % local
        return Routing(
            topk_ids=rearrange(ids, "t k etp -> t (k etp)"),
            topk_probs=repeat(routing.topk_probs, "t k -> t (k etp)", etp=self.etp),
            kept=repeat(routing.kept, "t k -> t (k etp)", etp=self.etp),
            num_experts=self.communicator.size * local,
        )

    def local_slots(self, ids: Int[Tensor, "N K"]) -> tuple[Int[Tensor, "N K"], Bool[Tensor, "N K"]]:
        """The slots that go to this rank's experts: their numbers from 0, and which these slots are.

        Args:
            ids: global expert id of each slot; negative for one that goes nowhere.

        Returns:
            Local ids, in range also for the slots of others, and the mask.
        """
        numbers = ids - self.first_local_expert
        local = numbers.clamp(0, self.num_local_experts - 1)
        return local, numbers == local
