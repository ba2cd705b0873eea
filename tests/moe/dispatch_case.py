"""One dispatch on simulated ranks, and the same on one rank by the dense loop: what dispatch tests compare.

Nothing is equal by chance: token values encode (rank, token, column), probabilities, upstream gradients and
experts are all distinct.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isozyme.core.topology import Layout, Topology
from isozyme.moe.dispatch import choose_dispatcher
from isozyme.moe.dispatch_padded import PaddedAllToAllDispatcher
from isozyme.moe.experts.loop import loop_experts
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.reference import reference_moe
from isozyme.moe.types import Dispatched, Dispatcher, Routing
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.simulated import SimulatedWorld, simulate
from isozyme.parallel.trace import Trace

HIDDEN, FFN = 3, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who routes what where. `ids[r][t]` are the K experts of token t of rank r, `kept` alike."""

    layout: Layout
    num_experts: int
    topk: int
    ids: tuple[tuple[tuple[int, ...], ...], ...]
    kept: tuple[tuple[tuple[bool, ...], ...], ...]
    schedule_seed: int = 0

    @property
    def ranks(self) -> int:
        return Topology(self.layout).world_size

    def routing(self, rank: int) -> Routing:
        shape = (len(self.ids[rank]), self.topk)
        probs = 0.3 + (torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape) + 1) / (7 + rank)
        return Routing(
            topk_ids=torch.tensor(self.ids[rank], dtype=torch.int64).view(shape),
            topk_probs=probs,
            kept=torch.tensor(self.kept[rank], dtype=torch.bool).view(shape),
            num_experts=self.num_experts,
        )

    def tokens(self, rank: int) -> Tensor:
        """Row t, column c of rank r holds r + t/10 + c/100 (up to 10 tokens)."""
        row = torch.arange(len(self.ids[rank]), dtype=torch.float64)[:, None]
        return rank + row / 10 + torch.arange(HIDDEN, dtype=torch.float64) / 100

    def upstream(self, rank: int) -> Tensor:
        return torch.cos(self.tokens(rank) * 37 + 1)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Canonical gate-up `[E, 2, F, H]` and down `[E, H, F]` of the whole model."""
        draw = torch.Generator().manual_seed(5)
        gate_up = torch.randn(self.num_experts, 2, FFN, HIDDEN, generator=draw, dtype=torch.float64)
        down = torch.randn(self.num_experts, HIDDEN, FFN, generator=draw, dtype=torch.float64)
        return gate_up, down


@dataclass(kw_only=True)
class Outcome:
    """Values and gradients: by rank for what is per token, of the whole model for the weights."""

    out: list[Tensor]
    tokens: list[Tensor]
    probs: list[Tensor]
    gate_up: Tensor
    down: Tensor
    trace: Trace | None = None
    dispatched: list[Dispatched] = field(default_factory=list)

    def pairs(self, other: Outcome) -> list[tuple[str, Tensor, Tensor]]:
        found = [
            (f"{name} of rank {rank}", mine, theirs)
            for name in ("out", "tokens", "probs")
            for rank, (mine, theirs) in enumerate(zip(getattr(self, name), getattr(other, name), strict=True))
        ]
        return [*found, ("gate_up", self.gate_up, other.gate_up), ("down", self.down, other.down)]

    def assert_close(self, other: Outcome, tolerance: float = 1e-11) -> None:
        for name, mine, theirs in self.pairs(other):
            torch.testing.assert_close(
                mine, theirs, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def build(name: str, placement: ExpertPlacement, case: Case) -> Dispatcher:
    if name == "padded":
        return PaddedAllToAllDispatcher(placement, fullest(case) + 1)
    return choose_dispatcher(name, placement)[0]  # type: ignore[arg-type]


def fullest(case: Case) -> int:
    """The most slots that one rank sends to one expert."""
    return max(int(case.routing(r).local_tokens_per_expert().max()) for r in range(case.ranks))


def run(case: Case, name: str, make: Callable[..., Dispatcher] = build) -> Outcome:
    """Dispatch, loop experts, combine and backward on every rank; gradients of weights summed over EDP."""
    all_gate_up, all_down = case.weights()

    def program(world: SimulatedWorld) -> tuple[Any, ...]:
        groups = ProcessGroups(Topology(case.layout), world)
        placement = ExpertPlacement.of(groups, case.num_experts)
        dispatcher = make(name, placement, case)
        at, local = groups.coordinates, placement.num_local_experts
        share = FFN // placement.etp
        mine = slice(at["ep"] * local, (at["ep"] + 1) * local)
        part = slice(at["etp"] * share, (at["etp"] + 1) * share)
        gate_up = all_gate_up[mine, :, part].clone().requires_grad_()
        down = (
            all_down[
                mine,
                :,
                :,
            ]
            .clone()[:, :, part]
            .contiguous()
            .requires_grad_()
        )
        tokens, routing = case.tokens(world.rank).requires_grad_(), case.routing(world.rank)
        routing.topk_probs.requires_grad_()
        dispatched = dispatcher.dispatch(tokens, routing)
        rows = loop_experts(dispatched.rows, dispatched.probs, gate_up.flatten(1, 2), down, dispatched)
        out = dispatcher.combine(rows, dispatched)
        out.backward(case.upstream(world.rank))
        grads = [tokens.grad, routing.topk_probs.grad, gate_up.grad, down.grad]
        assert all(grad is not None for grad in grads)
        return out.detach(), *grads, (mine, part), dispatched

    results, trace = simulate(case.ranks, program, schedule_seed=case.schedule_seed, trace=True)
    gate_up, down = torch.zeros_like(all_gate_up), torch.zeros_like(all_down)
    for _, _, _, of_gate_up, of_down, (mine, part), _ in results:
        gate_up[mine, :, part] += of_gate_up
        down[mine, :, part] += of_down
    return Outcome(
        out=[r[0] for r in results],
        tokens=[r[1] for r in results],
        probs=[r[2] for r in results],
        gate_up=gate_up,
        down=down,
        trace=trace,
        dispatched=[r[6] for r in results],
    )


def reference(case: Case) -> Outcome:
    """The same by the dense loop over all ranks' tokens at once."""
    gate_up, down = (weight.requires_grad_() for weight in case.weights())
    tokens = [case.tokens(rank).requires_grad_() for rank in range(case.ranks)]
    routings = [case.routing(rank) for rank in range(case.ranks)]
    for routing in routings:
        routing.topk_probs.requires_grad_()
    whole = Routing(
        topk_ids=torch.cat([routing.topk_ids for routing in routings]),
        topk_probs=torch.cat([routing.topk_probs for routing in routings]),
        kept=torch.cat([routing.kept for routing in routings]),
        num_experts=case.num_experts,
    )
    out = reference_moe(torch.cat(tokens), whole, gate_up, down)
    out.backward(torch.cat([case.upstream(rank) for rank in range(case.ranks)]))

    def grad(leaf: Tensor) -> Tensor:
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    return Outcome(
        out=list(out.detach().split([len(x) for x in tokens])),
        tokens=[grad(x) for x in tokens],
        probs=[grad(routing.topk_probs) for routing in routings],
        gate_up=grad(gate_up),
        down=grad(down),
    )
