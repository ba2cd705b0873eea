"""Checking a router: choices, weights and gradients against the definition, row by row.

A router here is a function from logits `[T, E]` to expert ids `[T, K]` and combine weights `[T, K]`. Nothing
is distributed: a router that looks at other tokens is found by routing each token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isozyme.core.config import RouterConfig
from isozyme.moe.testing.dispatcher import known_claims
from isozyme.moe.testing.router_world import (
    RouterPromises,
    RouterWorld,
    choice_of,
    parse_router,
    router_picture,
    router_worlds,
    weights_of,
)
from isozyme.moe.testing.search import Report, search
from isozyme.moe.testing.search import replay as replay_world
from isozyme.moe.testing.violation import Violation
from isozyme.moe.types import Routing

RouterFactory = Callable[[RouterConfig], Callable[[Tensor], Any]]
"""Builds, for a configuration, the function from logits to `(ids, weights)`, or to a `Routing`."""

_TOLERANCE = 1e-5


def check_router(
    factory: RouterFactory,
    *,
    promises: RouterPromises | None = None,
    examples: int = 200,
    seconds: float = 10.0,
    seed: int = 0,
    replay: str | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Look for logits that a router sends elsewhere, or weighs otherwise, than the definition says.

    Args:
        factory: builds the function from logits to ids and weights for a configuration.
        promises: what it is shown.

    The other arguments and the errors are those of `check_dispatcher`.
    """
    chosen = promises or RouterPromises()
    claims = known_claims(only)

    def judge(world: RouterWorld) -> None:
        judge_router(factory, world, chosen, claims)

    if replay is not None:
        return replay_world(parse_router(replay), judge)
    return search(router_worlds(chosen), judge, examples=examples, seconds=seconds, seed=seed)


def judge_router(
    factory: RouterFactory, world: RouterWorld, promises: RouterPromises, claims: Collection[str]
) -> None:
    """Raise a `Violation`, with a picture, for the first claim that does not hold."""
    ids: Tensor | None = None
    try:
        route = factory(world.config)
        logits = world.tensor().requires_grad_(promises.gradients)
        before = logits.detach().clone()
        ids, weights = routed(route, logits)
        wanted_ids, scores = choice_of(world)
        if "inputs_are_not_mutated" in claims and not logits.detach().equal(before):
            raise Violation("inputs_are_not_mutated", "the logits changed")
        if "ids_are_legal" in claims:
            ids_are_legal(world, ids)
        if "the_best_experts_are_chosen" in claims:
            the_best_experts_are_chosen(ids, wanted_ids, scores, ties=promises.ties_to_the_lower_id)
        if "weights_equal_the_definition" in claims:
            weights_equal_the_definition(world, ids, weights)
        if "logit_gradients_equal_the_definition" in claims and promises.gradients:
            logit_gradients_equal_the_definition(world, logits, ids, weights)
        if "tokens_are_routed_alone" in claims:
            tokens_are_routed_alone(world, route, ids, weights)
        if "bad_logits_stay_visible_and_alone" in claims and world.bad is not None:
            bad_logits_stay_visible_and_alone(world, route, ids, weights)
    except Violation as violation:
        violation.draw = partial(router_picture, world, ids)
        raise


def routed(route: Callable[[Tensor], Any], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights, whichever way the router returns them; an error becomes a violation."""
    try:
        found = route(logits)
    except Exception as error:
        violation = Violation("the_program_runs_to_its_end", f"{type(error).__name__}: {error}")
        violation.__cause__ = error
    else:
        return (found.topk_ids, found.topk_probs) if isinstance(found, Routing) else (found[0], found[1])
    raise violation


# --- Claims


def ids_are_legal(world: RouterWorld, ids: Tensor) -> None:
    """Shape, type, range and distinctness."""
    if ids.shape != (len(world.logits), world.topk) or ids.dtype not in (torch.int64, torch.int32):
        raise Violation(
            "ids_are_legal",
            f"expert ids have the shape {list(ids.shape)} and the type {ids.dtype}, not "
            f"{[len(world.logits), world.topk]} integers",
        )
    for token, row in enumerate(ids.tolist()):
        if len(set(row)) != world.topk or not set(row) <= set(range(world.num_experts)):
            raise Violation("ids_are_legal", f"token {token} goes to {row} of {world.num_experts} experts")


def the_best_experts_are_chosen(ids: Tensor, wanted: list[list[int]], scores: Tensor, *, ties: bool) -> None:
    """The choice is that of sorting by score, then id; without promised ties, any order among equals."""
    for token, (row, right) in enumerate(zip(ids.tolist(), wanted, strict=True)):
        alike = row == right
        if not ties:
            alike = torch.equal(scores[token, row], scores[token, right])
        if not alike:
            raise Violation("the_best_experts_are_chosen", f"token {token} goes to {row}, not {right}")


def weights_equal_the_definition(world: RouterWorld, ids: Tensor, weights: Tensor) -> None:
    """Scores of the chosen, renormalised if so configured, in at least fp32."""
    if weights.dtype not in (torch.float32, torch.float64):
        raise Violation("weights_equal_the_definition", f"weights have the type {weights.dtype}")
    right, defined = weights_of(world, world.tensor().double(), ids)
    for token, (row, wanted) in enumerate(zip(weights.detach().double(), right, strict=True)):
        if defined[token] and not torch.allclose(row, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise Violation(
                "weights_equal_the_definition",
                f"token {token} weighs its experts {_numbers(row)}, not {_numbers(wanted)}",
            )


def logit_gradients_equal_the_definition(
    world: RouterWorld, logits: Tensor, ids: Tensor, weights: Tensor
) -> None:
    """The gradient of a sum of weights, each with another factor."""
    factors = torch.cos(torch.arange(weights.numel(), dtype=torch.float64).view(weights.shape) * 2 + 1)
    exact = world.tensor().double().requires_grad_()
    right, defined = weights_of(world, exact, ids)
    (torch.where(defined[:, None], right, 0.0) * factors).sum().backward()
    if weights.requires_grad:
        (weights * factors.to(weights.dtype) * defined[:, None]).sum().backward()
    found = torch.zeros_like(exact) if logits.grad is None else logits.grad.double()
    wanted = torch.zeros_like(exact) if exact.grad is None else exact.grad
    tolerance = 2e-2 if logits.dtype == torch.bfloat16 else _TOLERANCE
    for token, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance):
            raise Violation(
                "logit_gradients_equal_the_definition",
                f"the gradient of token {token} is {_numbers(mine)}, not {_numbers(theirs)}",
            )


def tokens_are_routed_alone(
    world: RouterWorld, route: Callable[[Tensor], Any], ids: Tensor, weights: Tensor
) -> None:
    """Each token, routed by itself, gets the same."""
    for token, logits in enumerate(world.tensor()):
        own_ids, own_weights = routed(route, logits[None])
        if not (own_ids[0].equal(ids[token]) and _close(own_weights[0], weights[token])):
            raise Violation(
                "tokens_are_routed_alone",
                f"token {token} goes to {own_ids[0].tolist()} by itself, with weights "
                f"{_numbers(own_weights[0])}; among the others to {ids[token].tolist()}, with weights "
                f"{_numbers(weights[token])}",
            )


def bad_logits_stay_visible_and_alone(
    world: RouterWorld, route: Callable[[Tensor], Any], ids: Tensor, weights: Tensor
) -> None:
    """One logit is spoilt: its token shows it, the others do not notice."""
    assert world.bad is not None
    token, expert, value = world.bad
    logits = world.tensor()
    logits[token, expert] = float(value)
    bad_ids, bad_weights = routed(route, logits)
    ids_are_legal(world, bad_ids)
    name = "bad_logits_stay_visible_and_alone"
    if bad_weights[token].isfinite().all():
        raise Violation(name, f"token {token} has the logit {value}, but its weights are all finite")
    for other in range(len(logits)):
        same = bad_ids[other].equal(ids[other]) and _close(bad_weights[other], weights[other])
        if other != token and not same:
            raise Violation(name, f"token {other} is routed otherwise because token {token} has a {value}")


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9, equal_nan=True)


def _numbers(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values.tolist()) + "]"
