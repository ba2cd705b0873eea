"""Claims about what comes back, and about several runs; each a plain function that raises `Violation`.

Each takes what was given and what was seen; none knows the dispatcher. The names are those of `CLAIMS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from isozyme.moe.testing.arrivals import global_expert
from isozyme.moe.testing.compare import bits_equal, difference, first_wrong, short
from isozyme.moe.testing.inputs import Inputs
from isozyme.moe.testing.observe import Run, Seen
from isozyme.moe.testing.oracle import Expected, expected_arrivals
from isozyme.moe.testing.violation import Violation
from isozyme.moe.testing.world import World


def an_output_is_like_its_input(world: World, run: Run) -> None:
    """Shape and dtype of the result are those of the tokens."""
    del world
    for rank, (seen, given) in enumerate(zip(run.seen, run.inputs, strict=True)):
        if (seen.out.shape, seen.out.dtype) != (given.tokens.shape, given.tokens.dtype):
            raise Violation(
                "an_output_is_like_its_input",
                f"rank {rank} gave {list(given.tokens.shape)} {given.tokens.dtype} and got back "
                f"{list(seen.out.shape)} {seen.out.dtype}",
            )


def outputs_equal_the_dense_loop(world: World, run: Run, expected: Expected) -> None:
    """Each token gets what its own experts make of it."""
    found = (seen.out for seen in run.seen)
    _equal("outputs_equal_the_dense_loop", "token", found, expected.out, world)


def token_gradients_equal_the_dense_loop(world: World, run: Run, expected: Expected) -> None:
    """The gradient of a token is the sum over its kept slots, once each."""
    found = (seen.token_grads for seen in run.seen)
    _equal("token_gradients_equal_the_dense_loop", "token", found, expected.token_grads, world)


def weight_gradients_equal_the_dense_loop(world: World, run: Run, expected: Expected) -> None:
    """The gradient of a combine weight; zero for a dropped slot."""
    found = (seen.weight_grads for seen in run.seen)
    _equal(
        "weight_gradients_equal_the_dense_loop", "the weights of token", found, expected.weight_grads, world
    )


def expert_gradients_equal_the_dense_loop(world: World, run: Run, expected: Expected) -> None:
    """The gradient of each local expert is the sum over all tokens of its group."""
    found = (seen.expert_grads for seen in run.seen)
    _equal("expert_gradients_equal_the_dense_loop", "local expert", found, expected.expert_grads, world)


def _equal(
    claim: str, what: str, by_rank: Iterable[Tensor | None], wanted: Sequence[Tensor], world: World
) -> None:
    for rank, found in enumerate(by_rank):
        wrong = difference(what, rank, found, wanted, world.torch_dtype)
        if wrong is not None:
            raise Violation(claim, wrong)


def empty_experts_get_zero_gradients(world: World, run: Run) -> None:
    """An expert that nobody chose: its gradient exists and is exactly zero."""
    for rank, seen in enumerate(run.seen):
        for expert, slots in enumerate(expected_arrivals(world, run.inputs, rank)):
            if slots:
                continue
            where = f"expert {global_expert(world, rank, expert)} on rank {rank} has no rows, but"
            if seen.expert_grads is None:
                raise Violation("empty_experts_get_zero_gradients", f"{where} it has no gradient either")
            if not (seen.expert_grads[expert] == 0).all():
                raise Violation("empty_experts_get_zero_gradients", f"{where} its gradient is not zero")


def inputs_are_not_mutated(world: World, run: Run) -> None:
    """Nothing that a rank was given was written to."""
    del world
    for rank, seen in enumerate(run.seen):
        for name in seen.mutated:
            raise Violation("inputs_are_not_mutated", f"the {name} of rank {rank} changed")


def ranks_make_the_same_calls(world: World, run: Run) -> None:
    """Trace symmetry: no rank skips a call or makes another one because of its counts."""
    del world
    found = run.trace.difference()
    if found is not None:
        raise Violation("ranks_make_the_same_calls", found)


# --- Several runs


def identity_experts_return_the_tokens(world: World, run: Run) -> None:
    """Round trip, without weights: each token comes back once for each kept slot (and ETP rank)."""
    etp = world.topology.size("etp")
    for rank, (seen, given) in enumerate(zip(run.seen, run.inputs, strict=True)):
        wanted = given.tokens.double() * given.kept.sum(dim=1, keepdim=True) * etp
        token = first_wrong(seen.out, wanted, world.torch_dtype)
        if token is not None:
            raise Violation(
                "identity_experts_return_the_tokens",
                f"token {token} of rank {rank} came back as {short(seen.out[token])}, not "
                f"{short(wanted[token])}",
            )


def outputs_are_linear_in_the_weights(world: World, p: Run, q: Run, p_plus_q: Run) -> None:
    """The result for the sum of two sets of weights is the sum of the results."""
    for rank, (one, two, both) in enumerate(zip(p.seen, q.seen, p_plus_q.seen, strict=True)):
        token = first_wrong(both.out, one.out.double() + two.out.double(), world.torch_dtype)
        if token is not None:
            raise Violation(
                "outputs_are_linear_in_the_weights",
                f"token {token} of rank {rank}: f(p + q) = {short(both.out[token])}, but f(p) + f(q) = "
                f"{short(one.out[token] + two.out[token])}",
            )


def sums_are_rounded_once(world: World, run: Run, factors: Sequence[float]) -> None:
    """Experts multiply by `factors`; a sum in the tokens' dtype would lose one of them."""
    for rank, (seen, given) in enumerate(zip(run.seen, run.inputs, strict=True)):
        for token, ids in enumerate(given.ids.tolist()):
            mine = [factors[expert] for expert in ids]
            wanted = (given.tokens[token].double() * sum(mine)).to(world.torch_dtype)
            if not bits_equal(seen.out[token], wanted):
                raise Violation(
                    "sums_are_rounded_once",
                    f"with {world.dtype} tokens on {world.ranks} rank(s), of which each gets itself times "
                    f"{mine} from its experts, token {token} of rank {rank} came back as "
                    f"{short(seen.out[token])}, not {short(wanted)}: the sum was rounded on the way",
                )


def a_second_step_repeats_the_first(world: World, run: Run, again: Run) -> None:
    """An object that has been used before gives the same bits as a fresh one."""
    del world
    found = _changed(again.seen, run.seen)
    if found is not None:
        raise Violation("a_second_step_repeats_the_first", f"{found} when the object had been used before")


def the_schedule_does_not_matter(world: World, run: Run, other: Run) -> None:
    """Another order of the ranks gives the same bits."""
    del world
    found = _changed(other.seen, run.seen)
    if found is not None:
        raise Violation("the_schedule_does_not_matter", f"{found} under another schedule of the ranks")


def the_layout_does_not_matter(world: World, run: Run, elsewhere: Run) -> None:
    """The same tokens on other ranks get the same results and gradients."""
    for name in ("out", "token_grads", "weight_grads"):
        here, there = (
            {
                origin: value
                for seen, given in zip(any_run.seen, any_run.inputs, strict=True)
                for origin, value in zip(given.origins, _present(getattr(seen, name), given), strict=True)
            }
            for any_run in (run, elsewhere)
        )
        for (rank, token), value in here.items():
            if first_wrong(there[rank, token][None], value[None].double(), world.torch_dtype) is not None:
                raise Violation(
                    "the_layout_does_not_matter",
                    f"{name} of token {token} of rank {rank} is {short(value)}, but "
                    f"{short(there[rank, token])} when the tokens are on {len(elsewhere.seen)} rank(s)",
                )


def _present(value: Tensor | None, given: Inputs) -> list[Tensor]:
    return list(torch.zeros(len(given.origins), 1) if value is None else value)


def _changed(found: Sequence[Seen], wanted: Sequence[Seen]) -> str | None:
    """The first thing that is not the same, bit for bit; None if all is."""
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if mine.counts != theirs.counts:
            return f"rank {rank} received {list(mine.counts)} rows, not {list(theirs.counts)},"
        for name, value in mine.tensors().items():
            other = theirs.tensors()[name]
            alike = value is other if value is None or other is None else bits_equal(value, other)
            if not alike:
                return f"{name} of rank {rank} changed"
    return None
