"""Checking a whole mixture-of-experts layer: the same model and batch give the same results on any ranks.

The layer brings its own router and experts, so it is its own oracle: what it computes on one rank must come
out at every layout, in values and in every gradient. Whether the one rank is right can be asked with
`reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isozyme.moe.testing.adapters import Place, Style, place_of
from isozyme.moe.testing.compare import bits_equal, first_wrong, short
from isozyme.moe.testing.dispatcher import known_claims
from isozyme.moe.testing.layer_world import (
    LayerPromises,
    LayerWorld,
    layer_picture,
    layer_worlds,
    parse_layer,
)
from isozyme.moe.testing.observe import run_ranks
from isozyme.moe.testing.schedule import LAST_FIRST
from isozyme.moe.testing.search import Report, search
from isozyme.moe.testing.search import replay as replay_world
from isozyme.moe.testing.violation import Violation
from isozyme.parallel.simulated import SimulatedWorld
from isozyme.parallel.trace import Trace


@runtime_checkable
class LayerUnderTest(Protocol):
    """Write these two methods around your layer."""

    def forward(
        self, tokens: Float[Tensor, "B S H"], valid: Bool[Tensor, "B S"]
    ) -> tuple[Float[Tensor, "B S H"], Float[Tensor, ""] | None]:
        """The result for this rank's tokens, and what else belongs to the loss (a sum, not a mean)."""
        ...

    def gradients(self) -> Mapping[str, Tensor | None]:
        """After backward, and summed over ranks as your trainer does it: the gradient of each parameter.

        Names are global: `experts.3.up` is the same expert at every layout. Tensors are whole ones.
        """
        ...


LayerFactory = Callable[[Place], LayerUnderTest]


def check_moe_layer(
    factory: LayerFactory,
    *,
    style: Style = "isozyme",
    promises: LayerPromises | None = None,
    reference: Callable[[LayerUnderTest, Tensor, Tensor], Tensor] | None = None,
    examples: int = 40,
    seconds: float = 30.0,
    seed: int = 0,
    replay: str | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Look for a layout, a batch or a schedule at which a layer computes something else than on one rank.

    Args:
        factory: builds the layer of one rank, the same global model at every layout, in fp64 and with
            `place.hidden` columns.
        style: `torch` if it communicates by torch.distributed.
        promises: what it is shown.
        reference: for the layer on one rank, tokens and their mask, what must come out.

    The other arguments and the errors are those of `check_dispatcher`.
    """
    chosen = promises or LayerPromises()
    judge = LayerJudge(factory, style, chosen, reference, known_claims(only))
    if replay is not None:
        return replay_world(parse_layer(replay), judge)
    return search(layer_worlds(chosen), judge, examples=examples, seconds=seconds, seed=seed)


@dataclass(kw_only=True)
class LayerRun:
    """What came out, put together over ranks."""

    out: Tensor
    token_grads: Tensor
    gradients: list[dict[str, Tensor | None]]
    """By rank."""
    mutated: list[int]
    """Ranks whose inputs changed."""
    trace: Trace
    expected: Tensor | None = None


@dataclass(frozen=True)
class LayerJudge:
    """Judges a layer in one world."""

    factory: LayerFactory
    style: Style
    promises: LayerPromises
    reference: Callable[[LayerUnderTest, Tensor, Tensor], Tensor] | None
    claims: Collection[str]

    def __call__(self, world: LayerWorld) -> None:
        """Run the world and its one-rank twin, and raise the first violation with a picture."""
        asked = self.claims.__contains__
        try:
            one = self.run(world.on_one_rank())
            if one.expected is not None and asked("outputs_equal_the_dense_loop"):
                place = first_wrong(one.out.flatten(0, 1), one.expected.flatten(0, 1), torch.float64)
                if place is not None:
                    got, right = one.out.flatten(0, 1)[place], one.expected.flatten(0, 1)[place]
                    raise Violation(
                        "outputs_equal_the_dense_loop",
                        f"token {place} on one rank got {short(got)}, not {short(right)}",
                    )
            if asked("padding_touches_nothing") and self.promises.padding:
                padding_touches_nothing(world, one, self.run(world.on_one_rank(), poison=True))
            many = self.run(world)
            if asked("inputs_are_not_mutated") and many.mutated:
                raise Violation("inputs_are_not_mutated", f"the tokens of rank {many.mutated[0]} changed")
            if asked("replicas_agree"):
                replicas_agree(many)
            if asked("every_parameter_gets_a_gradient"):
                every_parameter_gets_a_gradient(one, many)
            if asked("the_layout_does_not_matter"):
                the_layout_does_not_matter(world, one, many)
            difference = many.trace.difference()
            if asked("ranks_make_the_same_calls") and self.promises.same_calls and difference:
                raise Violation("ranks_make_the_same_calls", difference)
            if asked("the_schedule_does_not_matter") and world.ranks > 1:
                other = self.run(replace(world, schedule=LAST_FIRST, delay=None))
                the_schedule_does_not_matter(many, other)
        except Violation as violation:
            violation.draw = partial(layer_picture, world)
            raise

    def run(self, world: LayerWorld, *, poison: bool = False) -> LayerRun:
        """Forward, backward and the layer's own reduction on every rank."""
        tokens, valid, upstream = world.batch()
        if poison:
            tokens = torch.where(valid[..., None], tokens, torch.nan)

        def program(sim: SimulatedWorld) -> tuple[Any, ...]:
            layer = self.factory(place_of(world, sim, self.style))
            mine = world.share(tokens, sim.rank).clone().requires_grad_()
            mask, before = world.share(valid, sim.rank), mine.detach().clone()
            out, extra = layer.forward(mine, mask)
            loss = (out * world.share(upstream, sim.rank)).sum()
            (loss if extra is None else loss + extra).backward()
            kept = bits_equal(mine.detach(), before)
            grads = dict(layer.gradients())
            wanted = self.reference(layer, before, mask) if self.reference and world.ranks == 1 else None
            return out.detach(), mine.grad, grads, kept, wanted

        results, trace = run_ranks(world, program, torch_style=self.style == "torch")
        whole = [torch.full_like(upstream, torch.nan) for _ in range(2)]
        for rank, (out, grad, *_) in enumerate(results):
            for target, value in zip(whole, (out, grad), strict=True):
                if value is not None:
                    world.share(target, rank).copy_(value)
        return LayerRun(
            out=whole[0],
            token_grads=whole[1],
            gradients=[result[2] for result in results],
            mutated=[rank for rank, result in enumerate(results) if not result[3]],
            trace=trace,
            expected=results[0][4],
        )


# --- Claims


def padding_touches_nothing(world: LayerWorld, clean: LayerRun, poisoned: LayerRun) -> None:
    """NaN in the padding changes no output of a real token, and no gradient of a parameter."""
    _, valid, _ = world.batch()
    if not bits_equal(clean.out[valid], poisoned.out[valid]):
        raise Violation("padding_touches_nothing", "NaN in the padding changes the output of real tokens")
    for name, value in clean.gradients[0].items():
        other = poisoned.gradients[0][name]
        if value is not None and other is not None and not bits_equal(value, other):
            raise Violation("padding_touches_nothing", f"NaN in the padding changes the gradient of {name}")


def replicas_agree(run: LayerRun) -> None:
    """The same parameter has the same gradient on every rank that holds it."""
    known: dict[str, tuple[int, Tensor]] = {}
    for rank, gradients in enumerate(run.gradients):
        for name, value in gradients.items():
            if value is None:
                continue
            first, other = known.setdefault(name, (rank, value))
            if not torch.allclose(value.double(), other.double(), rtol=1e-9, atol=1e-11):
                found = f"{short(value)} on rank {rank}, but {short(other)} on rank {first}"
                raise Violation("replicas_agree", f"the gradient of {name} is {found}")


def every_parameter_gets_a_gradient(one: LayerRun, many: LayerRun) -> None:
    """No rank lacks a gradient, and together the ranks have the parameters of the one-rank model."""
    for rank, gradients in enumerate(many.gradients):
        for name, value in gradients.items():
            if value is None:
                raise Violation("every_parameter_gets_a_gradient", f"{name} has no gradient on rank {rank}")
    here = {name for gradients in many.gradients for name in gradients}
    for name in sorted(here ^ set(one.gradients[0])):
        where = "on one rank only" if name not in here else "only on several ranks"
        raise Violation("every_parameter_gets_a_gradient", f"there is a parameter {name} {where}")


def the_layout_does_not_matter(world: LayerWorld, one: LayerRun, many: LayerRun) -> None:
    """Outputs, gradients of tokens and of every parameter are those of one rank."""
    _, valid, _ = world.batch()
    for what, mine, right in (
        ("output", many.out, one.out),
        ("gradient", many.token_grads, one.token_grads),
    ):
        place = first_wrong(mine[valid], right[valid], torch.float64)
        if place is not None:
            window, token = valid.nonzero()[place].tolist()
            raise Violation(
                "the_layout_does_not_matter",
                f"the {what} of token {token} of window {window} is {short(mine[window, token])} here, but "
                f"{short(right[window, token])} on one rank",
            )
    for gradients in many.gradients:
        for name, value in gradients.items():
            wanted = one.gradients[0][name]
            if value is None or wanted is None:
                continue
            if value.shape != wanted.shape or not torch.allclose(value, wanted, rtol=1e-9, atol=1e-10):
                raise Violation(
                    "the_layout_does_not_matter",
                    f"the gradient of {name} is {short(value)} here, but {short(wanted)} on one rank"
                    f"{_multiple(value, wanted)}",
                )


def the_schedule_does_not_matter(run: LayerRun, other: LayerRun) -> None:
    """The same bits, whichever rank runs first."""
    if not (bits_equal(run.out, other.out) and bits_equal(run.token_grads, other.token_grads)):
        raise Violation(
            "the_schedule_does_not_matter", "outputs or gradients depend on which rank runs first"
        )


def _multiple(value: Tensor, right: Tensor) -> str:
    total, wanted = float(value.abs().sum()), float(right.abs().sum())
    if value.shape != right.shape or wanted == 0 or not torch.allclose(value, right * (total / wanted)):
        return ""
    return f": {total / wanted:.4g} times as much"
