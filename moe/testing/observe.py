"""One run of a dispatcher in a world: dispatch, experts, combine and backward on every simulated rank.

What each rank saw is recorded; nothing is judged here but what makes it impossible to go on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.core.errors import CommunicationError
from isozyme.moe.testing.adapters import DispatcherFactory, Place, Sent, Style, place_of, send
from isozyme.moe.testing.inputs import ExpertParameters, Inputs, experts_of
from isozyme.moe.testing.schedule import schedule_from
from isozyme.moe.testing.setting import Setting
from isozyme.moe.testing.violation import Violation
from isozyme.moe.testing.world import World
from isozyme.parallel.simulated import Delay, SimulatedWorld, simulate
from isozyme.parallel.simulated_torch import simulate_torch
from isozyme.parallel.trace import Trace


@dataclass(kw_only=True)
class Seen:
    """What one rank saw in one step."""

    rows: Float[Tensor, "R H"]
    """The arrived rows that count, with what a dispatcher allocated behind them cut off."""
    probs: Float[Tensor, "R"] | None
    counts: tuple[int, ...]
    out: Tensor
    token_grads: Tensor | None = None
    weight_grads: Tensor | None = None
    expert_grads: Tensor | None = None
    """`[E_local, H + 1, H]`, weight over bias."""
    mutated: tuple[str, ...] = ()
    """Which of the inputs were changed."""

    def by_expert(self) -> list[Tensor]:
        """The rows of each local expert."""
        return list(self.rows.split(self.counts))

    def tensors(self) -> dict[str, Tensor | None]:
        """Everything that must be reproducible."""
        names = ("rows", "probs", "out", "token_grads", "weight_grads", "expert_grads")
        return {name: getattr(self, name) for name in names}


@dataclass(kw_only=True)
class Run:
    """One step of all ranks."""

    seen: list[Seen]
    """What each rank saw."""
    trace: Trace
    """Who said what to whom."""
    inputs: Sequence[Inputs]
    """What each rank was given."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The dispatcher under test: how to build it, and how to talk to it."""

    factory: DispatcherFactory
    style: Style = "isozyme"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One use of a dispatcher: dispatch, experts, combine and, if so, backward."""

    inputs: Sequence[Inputs]
    """What each rank is given."""
    backward: bool = True
    identity: bool = False
    """Experts that change nothing and apply no weights, instead of affine ones."""
    factors: tuple[float, ...] = ()
    """With `identity`: what each expert multiplies its rows by, by global number; empty for 1."""


def observe(subject: Subject, world: World, *steps: Step) -> list[Run]:
    """Run the dispatcher of `subject` on all ranks, the same object in each step.

    Returns:
        A run for each step; the trace of each is that of all together.

    Raises:
        Violation: `the_program_runs_to_its_end`, `ranks_agree_about_their_calls` or
            `counts_describe_the_rows`.
    """
    experts = experts_of(world)

    def program(sim: SimulatedWorld) -> list[Seen]:
        place = place_of(world, sim, subject.style)
        dispatcher = subject.factory(place)
        mine = _own(experts, place, world)
        return [_one_step(subject.style, dispatcher, place, step, mine) for step in steps]

    seen, trace = run_ranks(world, program, torch_style=subject.style == "torch")
    return [
        Run(seen=[of_rank[number] for of_rank in seen], trace=trace, inputs=step.inputs)
        for number, step in enumerate(steps)
    ]


def run_ranks(
    world: Setting, program: Callable[[SimulatedWorld], Any], *, torch_style: bool
) -> tuple[list[Any], Trace]:
    """Run one program on the ranks of a world as its schedule says; faults become violations."""
    return guarded(
        lambda: (simulate_torch if torch_style else simulate)(
            world.ranks,
            program,
            schedule=schedule_from(world.schedule),
            faults=[Delay(*world.delay)] if world.delay is not None else [],
            trace=True,
        )
    )


def guarded(run: Callable[[], tuple[list[Any], Trace]]) -> tuple[list[Any], Trace]:
    """Run simulated ranks; an error that ends them becomes the violation of a claim, with its cause."""
    try:
        return run()
    except Violation:
        raise
    except CommunicationError as error:
        violation = Violation("ranks_agree_about_their_calls", _told(error))
        violation.__cause__ = error
    except Exception as error:
        violation = Violation("the_program_runs_to_its_end", f"{type(error).__name__}: {_told(error)}")
        violation.__cause__ = error
    raise violation


def _told(error: Exception) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def _own(experts: ExpertParameters, place: Place, world: World) -> Float[Tensor, "E_local H1 H"]:
    """The parameters of a rank's own experts as one leaf, weight over bias."""
    first = place.ep_rank * place.num_local_experts
    etp_rank = world.topology.index(place.rank, "etp")
    mine = slice(first, first + place.num_local_experts)
    return torch.cat([experts.weight[mine, etp_rank], experts.bias[mine, etp_rank, None]], dim=1)


def _one_step(style: Style, dispatcher: Any, place: Place, step: Step, parameters: Tensor) -> Seen:
    given, backward = step.inputs[place.rank], step.backward
    parameters = parameters.detach().requires_grad_(backward)
    # A deep copy keeps the memory layout, so that a run can neither see nor change what another run is given.
    tokens, weights, upstream = (copy.deepcopy(x) for x in (given.tokens, given.weights, given.upstream))
    before = {"tokens": tokens.clone(), "weights": weights.clone(), "incoming gradient": upstream.clone()}
    tokens.requires_grad_(backward)
    weights.requires_grad_(backward)
    sent, ids_kept = send(dispatcher, style, place, tokens, given, weights)
    arrived = sent.rows.detach().clone(), None if sent.probs is None else sent.probs.detach().clone()
    out = sent.combine(_experts(sent, parameters, step, place))
    if backward and out.requires_grad:
        out.backward(upstream)
    after = {"tokens": tokens, "weights": weights, "incoming gradient": upstream}
    mutated = [name for name, value in before.items() if not value.equal(after[name].detach())]
    if not ids_kept():
        mutated.append("expert ids")
    return Seen(
        rows=arrived[0][: sent.num_rows],
        probs=None if arrived[1] is None else arrived[1][: sent.num_rows],
        counts=sent.counts,
        out=out.detach().clone(),
        token_grads=tokens.grad,
        weight_grads=weights.grad,
        expert_grads=parameters.grad,
        mutated=tuple(mutated),
    )


def _experts(sent: Sent, parameters: Tensor, step: Step, place: Place) -> Tensor:
    """Each expert on its rows; what stands for no slot becomes NaN, so that reading it is noticed."""
    rows, size = sent.rows, sent.rows.shape[0]
    if step.identity:
        first = place.ep_rank * place.num_local_experts
        factors = step.factors[first : first + place.num_local_experts]
        by_row = [factor for factor, count in zip(factors, sent.counts, strict=False) for _ in range(count)]
        by_row += [1.0] * (size - len(by_row))
        results = rows * torch.tensor(by_row, dtype=rows.dtype)[:, None]
    else:
        parts = [
            rows[: sent.num_rows].split(sent.counts)[expert] @ of_one[:-1] + of_one[-1]
            for expert, of_one in enumerate(parameters.unbind(0))
        ]
        tail = rows.new_zeros(size - sent.num_rows, rows.shape[1])
        results = torch.cat([*parts, tail])
        if sent.probs is not None:
            weights = torch.cat([sent.probs[: sent.num_rows], sent.probs.new_zeros(len(tail))])
            wide = torch.promote_types(results.dtype, weights.dtype)
            results = (results.to(wide) * weights.to(wide)[:, None]).to(rows.dtype)
    filler = (rows.detach() == 0).all(dim=1) | (torch.arange(size) >= sent.num_rows)
    return torch.where(filler[:, None], torch.full_like(results, torch.nan), results)
