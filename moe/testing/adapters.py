"""How the toolkit talks to a dispatcher: what it is told, what it is given, and what it returns.

Two styles. `isozyme`: the protocol `isozyme.moe.types.Dispatcher`. `torch`: plain tensors, and communication
by torch.distributed, as in `TensorDispatcher`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.core.topology import Topology
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.testing.inputs import Inputs
from isozyme.moe.testing.setting import Setting
from isozyme.moe.testing.violation import Violation
from isozyme.moe.types import Dispatched
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.simulated import SimulatedWorld

Style = Literal["isozyme", "torch"]


@runtime_checkable
class TensorDispatcher(Protocol):
    """A dispatcher of plain tensors: write these two methods around your own."""

    def dispatch(
        self, tokens: Float[Tensor, "T H"], topk_ids: Int[Tensor, "T K"], topk_probs: Float[Tensor, "T K"]
    ) -> tuple[Tensor, Any, Tensor | None, Any]:
        """Send each token to its experts.

        `topk_ids` are global expert ids, int64; -1 marks a slot that is not sent (only if drops are
        promised).

        Returns:
            `(rows, tokens_per_expert, row_probs, handle)`: `rows` `[R, H]` grouped by local expert, expert 0
            first; how many rows each local expert has (a tensor or integers); the combine weight of each row
            `[R]`, or None if `combine` applies the weights itself; whatever `combine` needs.
        """
        ...

    def combine(self, rows: Float[Tensor, "R H"], handle: Any) -> Float[Tensor, "T H"]:
        """Bring the experts' results back, and add them up by token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a factory is told about the rank that it builds a dispatcher or a layer for."""

    rank: int
    """Global rank."""
    ep_rank: int
    ep_size: int
    """The position of this rank among those that hold the experts together, and their number."""
    num_experts: int
    topk: int
    hidden: int
    capacity: int
    """The most slots that any rank sends to any expert: what buffers of a fixed size must hold."""
    topology: Topology
    """The rank arithmetic of the layout."""
    world: SimulatedWorld
    """This rank's view of the simulated world."""
    group: Any = None
    """Style torch: the process group of torch.distributed over the ranks of EP."""

    @cached_property
    def groups(self) -> ProcessGroups:
        """The communicators of this rank, built when they are first asked for (on all ranks, or on none)."""
        return ProcessGroups(self.topology, self.world)

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank; the first is number `ep_rank * num_local_experts`."""
        return self.num_experts // self.ep_size

    @property
    def placement(self) -> ExpertPlacement:
        """Which rank holds which expert."""
        return ExpertPlacement.of(self.groups, self.num_experts)


DispatcherFactory = Callable[[Place], Any]
"""Builds the dispatcher of one rank; called on every rank at the start of every run."""


def place_of(world: Setting, sim: SimulatedWorld, style: Style) -> Place:
    """The place of a simulated rank in the world's layout. All ranks call it together."""
    topology = world.topology
    group = None
    if style == "torch":
        for ranks in world.groups():
            built = dist.new_group(list(ranks), group_desc="ep")
            group = built if sim.rank in ranks else group
    return Place(
        rank=sim.rank,
        ep_rank=topology.index(sim.rank, "ep"),
        ep_size=topology.size("ep"),
        num_experts=world.num_experts,
        topk=world.topk,
        hidden=world.hidden,
        capacity=world.fullest(),
        topology=topology,
        world=sim,
        group=group,
    )


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a dispatcher's `dispatch` returned, in one form for both styles."""

    rows: Tensor
    probs: Tensor | None
    counts: tuple[int, ...]
    num_rows: int
    combine: Callable[[Tensor], Tensor]


def send(
    dispatcher: Any, style: Style, place: Place, tokens: Tensor, inputs: Inputs, weights: Tensor
) -> tuple[Sent, Callable[[], bool]]:
    """Call `dispatch`; also returns a test of whether the ids were left as they were given."""
    if style == "isozyme":
        routing = inputs.routing(place.num_experts, weights)
        dispatched: Dispatched = dispatcher.dispatch(tokens, routing)
        sent = _checked(
            dispatched.rows,
            dispatched.counts_on_host(),
            dispatched.probs,
            dispatched.num_rows,
            place,
            tokens.dtype,
            lambda rows: dispatcher.combine(rows, dispatched),
        )
        return sent, lambda: routing.topk_ids.equal(inputs.ids) and routing.kept.equal(inputs.kept)
    ids = torch.where(inputs.kept, inputs.ids, -1)
    given = ids.clone()
    rows, per_expert, probs, handle = dispatcher.dispatch(tokens, ids, weights)
    counts = tuple(int(n) for n in (per_expert.tolist() if isinstance(per_expert, Tensor) else per_expert))
    sent = _checked(
        rows, counts, probs, sum(counts), place, tokens.dtype, lambda out: dispatcher.combine(out, handle)
    )
    return sent, lambda: ids.equal(given)


def _checked(
    rows: Tensor,
    counts: Sequence[int],
    probs: Tensor | None,
    num_rows: int,
    place: Place,
    dtype: torch.dtype,
    combine: Callable[[Tensor], Tensor],
) -> Sent:
    """`Sent`, if its parts fit together so far that experts can run on it."""
    found = (
        f"rank {place.rank} returned rows {list(rows.shape)} and tokens_per_expert={list(counts)} for "
        f"{place.num_local_experts} local experts"
    )
    if probs is not None:
        found += f", row_probs {list(probs.shape)}"
    fits = rows.ndim == 2 and rows.shape[1] == place.hidden and len(counts) == place.num_local_experts
    fits = fits and sum(counts) == num_rows <= len(rows) and min(counts, default=0) >= 0
    fits = fits and (probs is None or (probs.ndim == 1 and len(probs) >= num_rows))
    if not fits:
        raise Violation("counts_describe_the_rows", found)
    if rows.dtype != dtype:
        raise Violation(
            "every_row_was_sent", f"rank {place.rank} sent {dtype} tokens and received {rows.dtype} rows"
        )
    return Sent(rows=rows, probs=probs, counts=tuple(counts), num_rows=num_rows, combine=combine)
