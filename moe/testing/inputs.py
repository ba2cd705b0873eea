"""The tensors of a world: nothing in them is equal by chance.

Token values encode (rank, token, column); combine weights, incoming gradients and experts are all distinct.
So a row in the wrong place, a weight of another slot or a gradient counted twice is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from isozyme.moe.testing.world import MOST_TOKENS, Memory, World
from isozyme.moe.types import Routing

Origin = tuple[int, int]
"""(rank, token) in the world."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What one rank is given."""

    tokens: Float[Tensor, "T H"]
    ids: Int[Tensor, "T K"]
    """Global expert of each slot, int64, also where it is dropped."""
    kept: Bool[Tensor, "T K"]
    weights: Float[Tensor, "T K"]
    """Combine weights, at least fp32."""
    upstream: Float[Tensor, "T H"]
    """The gradient that comes in for the result."""
    origins: tuple[Origin, ...]
    """Where each token comes from, for messages."""

    def routing(self, num_experts: int, weights: Tensor | None = None) -> Routing:
        """The routing of these tokens, with other weights if given; nothing is shared with the inputs."""
        return Routing(
            topk_ids=self.ids.clone(),
            topk_probs=self.weights if weights is None else weights,
            kept=self.kept.clone(),
            num_experts=num_experts,
        )


def inputs_of(world: World) -> list[Inputs]:
    """The inputs of every rank, in the world's dtype and memory layout."""
    return [_inputs(world, rank) for rank in range(world.ranks)]


def _inputs(world: World, rank: int) -> Inputs:
    shape = (len(world.ids[rank]), world.topk)
    dtype = getattr(torch, world.dtype)
    token = torch.arange(shape[0], dtype=torch.float64)[:, None]
    column = torch.arange(world.hidden, dtype=torch.float64)
    kept = torch.ones(shape, dtype=torch.bool)
    number = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape) + 1
    weights = 0.25 + (number * world.ranks + rank) / (MOST_TOKENS * world.ranks)
    for of_rank, at, choice in world.dropped:
        if of_rank == rank:
            kept[at, choice] = False
    for of_rank, at, choice in world.zero:
        if of_rank == rank:
            weights[at, choice] = 0.0
    upstream = torch.cos(rank * 17 + token * 5 + column * 1.7 + 1)
    return Inputs(
        tokens=arranged(payload(world, rank).to(dtype), world.memory),
        ids=torch.tensor(world.ids[rank], dtype=torch.int64).view(shape),
        kept=kept,
        weights=weights.to(torch.promote_types(dtype, torch.float32)),
        upstream=arranged(upstream.to(dtype), world.memory),
        origins=tuple((rank, at) for at in range(shape[0])),
    )


def payload(world: World, rank: int) -> Float[Tensor, "T H"]:
    """The values of a rank's tokens: integers below 256, which every dtype holds exactly.

    Column 0 holds 1 + rank, column 1 holds 64 + token, the others mix rank, token and column. Expanded tokens
    have one value in all columns, 1 + 64 rank + token, and need fp32 or more. No value is zero.
    """
    token = torch.arange(len(world.ids[rank]), dtype=torch.float64)[:, None]
    if world.memory == "expanded":
        return (1 + MOST_TOKENS * rank + token).expand(-1, world.hidden).contiguous()
    column = torch.arange(world.hidden, dtype=torch.float64)
    mixed = 128 + (rank * 7 + token * 3 + column * 11) % 64
    mixed[:, :1] = 1 + rank
    mixed[:, 1:2] = MOST_TOKENS + token
    return mixed


def arranged(values: Float[Tensor, "T H"], memory: Memory) -> Float[Tensor, "T H"]:
    """The values in another memory layout; expanded, all columns have those of the first."""
    if memory == "transposed":
        return values.t().contiguous().t()
    if memory == "sliced":
        wide = torch.full((2 * values.shape[0], values.shape[1] + 2), 99.0, dtype=values.dtype)
        wide[::2, 1:-1] = values
        return wide[::2, 1:-1]
    if memory == "expanded":
        return values[:, :1].contiguous().expand(values.shape)
    return values.contiguous()


def dealt(inputs: Sequence[Inputs], ranks: int) -> list[Inputs]:
    """The same tokens in the same order, dealt to another number of ranks."""
    total = sum(len(part.origins) for part in inputs)
    share = max(-(-total // ranks), 1)
    sizes = [max(min(share, total - rank * share), 0) for rank in range(ranks)]
    columns = {
        name: torch.cat([getattr(part, name) for part in inputs]).split(sizes)
        for name in ("tokens", "ids", "kept", "weights", "upstream")
    }
    origins = [origin for part in inputs for origin in part.origins]
    return [
        Inputs(
            **{name: parts[rank].clone() for name, parts in columns.items()},
            origins=tuple(origins[rank * share : rank * share + sizes[rank]]),
        )
        for rank in range(ranks)
    ]


def reweighted(inputs: Sequence[Inputs], *, scale: float, add: float) -> list[Inputs]:
    """The same inputs with weights `scale * p + add`, zeros included."""
    return [replace(part, weights=part.weights * scale + add) for part in inputs]


@dataclass(frozen=True, kw_only=True)
class ExpertParameters:
    """Affine experts, all distinct: expert e adds `x W[e, j] + b[e, j]` on each ETP rank j that holds it."""

    weight: Float[Tensor, "E etp H H2"]
    bias: Float[Tensor, "E etp H"]


def experts_of(world: World) -> ExpertParameters:
    """The experts of the whole model, in the world's dtype; an expert's values depend on its id alone."""
    etp, hidden = world.topology.size("etp"), world.hidden
    draw = torch.Generator().manual_seed(5)
    shape = (world.num_experts, etp, hidden + 1, hidden)
    values = (torch.randn(shape, generator=draw, dtype=torch.float64) / 8).to(getattr(torch, world.dtype))
    return ExpertParameters(weight=values[:, :, :-1].contiguous(), bias=values[:, :, -1].contiguous())
