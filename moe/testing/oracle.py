"""What must come out of a dispatch, by definitions that are obviously right: plain loops and a dense model.

Nothing here knows how rows travel. The dense loop sees all tokens of a group of ranks at once and lets every
expert see every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isozyme.moe.testing.inputs import ExpertParameters, Inputs
from isozyme.moe.testing.world import Slot, World


@dataclass(kw_only=True)
class Expected:
    """By rank; in fp64."""

    out: list[Tensor] = field(default_factory=list)
    token_grads: list[Tensor] = field(default_factory=list)
    weight_grads: list[Tensor] = field(default_factory=list)
    expert_grads: list[Tensor] = field(default_factory=list)
    """`[E_local, H + 1, H]` of each rank's own experts, weight over bias: its group's tokens only."""


def expected_arrivals(world: World, inputs: Sequence[Inputs], rank: int) -> list[list[Slot]]:
    """The slots `(rank, token, choice)` that must arrive for each local expert of a rank, in order."""
    topology = world.topology
    local = world.num_experts // topology.size("ep")
    first = topology.index(rank, "ep") * local
    return [
        [
            (source, token, choice)
            for source in topology.group(rank, ("etp", "ep"))
            for token, (row, kept) in enumerate(
                zip(inputs[source].ids.tolist(), inputs[source].kept.tolist(), strict=True)
            )
            for choice in range(world.topk)
            if kept[choice] and row[choice] == expert
        ]
        for expert in range(first, first + local)
    ]


def dense_loop(world: World, inputs: Sequence[Inputs], experts: ExpertParameters) -> Expected:
    """Outputs and all gradients, each group of ranks with its own copy of the experts."""
    found = Expected()
    by_rank: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for ranks in sorted({world.topology.group(rank, ("etp", "ep")) for rank in range(len(inputs))}):
        by_rank |= _one_group(world, ranks, [inputs[rank] for rank in ranks], experts)
    for rank in range(len(inputs)):
        for column, value in zip(
            (found.out, found.token_grads, found.weight_grads, found.expert_grads), by_rank[rank], strict=True
        ):
            column.append(value)
    return found


def _one_group(
    world: World, ranks: Sequence[int], inputs: Sequence[Inputs], experts: ExpertParameters
) -> dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]:
    sizes = [len(part.origins) for part in inputs]
    tokens = torch.cat([part.tokens for part in inputs]).double().requires_grad_()
    weights = torch.cat([part.weights for part in inputs]).double().requires_grad_()
    ids, kept = torch.cat([part.ids for part in inputs]), torch.cat([part.kept for part in inputs])
    parameters = torch.cat([experts.weight, experts.bias[:, :, None]], dim=2).double().requires_grad_()
    one = torch.cat([tokens, torch.ones(len(tokens), 1, dtype=torch.float64)], dim=1)
    out = torch.zeros_like(tokens)
    for expert in range(world.num_experts):
        weight = (weights * (kept & (ids == expert))).sum(dim=1)
        out = out + (one @ parameters[expert].sum(dim=0)) * weight[:, None]
    out.backward(torch.cat([part.upstream for part in inputs]).double())
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (tokens, weights, parameters)]
    topology = world.topology
    local = world.num_experts // topology.size("ep")
    found = {}
    for rank, mine, of_tokens, of_weights in zip(
        ranks, out.detach().split(sizes), grads[0].split(sizes), grads[1].split(sizes), strict=True
    ):
        first = topology.index(rank, "ep") * local
        of_experts = grads[2][first : first + local, topology.index(rank, "etp")]
        found[rank] = (mine, of_tokens, of_weights, of_experts)
    return found
