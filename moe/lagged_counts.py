"""The previous step's load of each expert, which the balance loss of scope `global_lagged` refers to.

Each router holds it as a buffer: identical on all ranks of a stage, saved like a weight, zero before the
first step (the loss then takes the load for even). It is a count, and exact in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isozyme.moe.expert_bias import expert_buffer_spec, routed_by_all
from isozyme.parallel.parameters import local_initial_value
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import attach


def create_lagged_counts(
    name: str, num_experts: int, groups: ProcessGroups, *, device: torch.device | str
) -> Float[Tensor, "E"]:
    """Zeros with their spec attached, in fp64, which a cast of the module leaves alone."""
    spec = expert_buffer_spec(name, num_experts, min_dtype=torch.float64)
    counts = local_initial_value(spec, groups, seed=0, device=device, dtype=torch.float64)
    attach(counts, spec)
    return counts


@torch.no_grad()
def update_lagged_counts(
    modules: Sequence[nn.Module], routed: Sequence[Int[Tensor, "E"]], groups: ProcessGroups
) -> None:
    """Note what one optimiser step routed, for the next.

    All ranks of one pipeline stage call it together with the same routers in the same order.

    Args:
        modules: routers that have `lagged_counts`, with the same number of experts.
        routed: for each, `RouterStats.routed` summed over this rank's micro-batches. They are summed over
            TP x CP x DP here, in one all-reduce of integers.
        groups: this rank's groups.

    Raises:
        ConfigError: if a router has no counts.
    """
    for module, total in zip(modules, routed_by_all(len(modules), routed, groups), strict=True):
        kept = module.lagged_counts
        assert isinstance(kept, Tensor)
        kept.copy_(total)
