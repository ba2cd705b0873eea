"""Checking a capacity cut: exactly the right slots are kept, and no others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.errors import UsageError
from isozyme.moe.capacity import DropPolicy
from isozyme.moe.testing.dispatcher import known_claims
from isozyme.moe.testing.search import Report, search
from isozyme.moe.testing.search import replay as replay_world
from isozyme.moe.testing.strategies import Draw
from isozyme.moe.testing.violation import Violation

Cut = Callable[[Tensor, Tensor, int, int], Tensor]
"""From ids `[T, K]`, weights `[T, K]`, E and the capacity: which slots are kept `[T, K]`."""


@dataclass(frozen=True, kw_only=True)
class CapacityWorld:
    """Slots of one window: experts, weights in units of 1/8 (with ties), and the capacity."""

    ids: tuple[tuple[int, ...], ...]
    eighths: tuple[tuple[int, ...], ...]
    num_experts: int
    topk: int
    capacity: int

    def line(self) -> str:
        """The world as text, from which `parse_capacity` makes it again."""
        ids, eighths = (
            ",".join(".".join(map(str, row)) for row in rows) for rows in (self.ids, self.eighths)
        )
        numbers = f"experts={self.num_experts} topk={self.topk} capacity={self.capacity}"
        return f"{numbers} ids={ids} weights={eighths}"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Ids, int64, and weights, fp64."""
        shape = (len(self.ids), self.topk)
        weights = torch.tensor(self.eighths, dtype=torch.float64).view(shape) / 8
        return torch.tensor(self.ids, dtype=torch.int64).view(shape), weights


def parse_capacity(line: str) -> CapacityWorld:
    """The world that prints as `line`.

    Raises:
        UsageError: if it is not such a line.
    """
    try:
        words = dict(word.split("=", 1) for word in line.split())
        ids, eighths = (
            tuple(tuple(map(int, row.split("."))) for row in words[name].split(",") if row)
            for name in ("ids", "weights")
        )
        numbers = {name: int(words[name]) for name in ("topk", "capacity")}
        return CapacityWorld(ids=ids, eighths=eighths, num_experts=int(words["experts"]), **numbers)
    except (KeyError, ValueError) as error:
        raise UsageError(f"a replay line must be one that a violation printed: {line!r}; {error}.") from error


@st.composite
def capacity_worlds(draw: Draw, tokens: int = 6) -> CapacityWorld:
    """Any capacity from none to more than there are slots; ties among the weights."""
    experts = draw(st.integers(1, 4))
    topk = draw(st.integers(1, experts))
    count = draw(st.integers(0, tokens))
    row = st.permutations(range(experts)).map(lambda order: tuple(order[:topk]))
    weights = st.tuples(*[st.integers(1, 4)] * topk)
    return CapacityWorld(
        ids=tuple(draw(row) for _ in range(count)),
        eighths=tuple(draw(weights) for _ in range(count)),
        num_experts=experts,
        topk=topk,
        capacity=draw(st.integers(0, count + 1)),
    )


def check_capacity(
    cut: Cut,
    *,
    policy: DropPolicy,
    examples: int = 200,
    seconds: float = 10.0,
    seed: int = 0,
    replay: str | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Look for a window of which an expert keeps too many slots, too few, or the wrong ones.

    Args:
        cut: which slots are kept, from ids, weights, the number of experts and the capacity.
        policy: `probability` keeps the largest weights, ties to the earlier token, then choice; `position`
            the first tokens, then choices.

    The other arguments and the errors are those of `check_dispatcher`.
    """
    claims = known_claims(only)

    def judge(world: CapacityWorld) -> None:
        judge_capacity(cut, world, policy, claims)

    if replay is not None:
        return replay_world(parse_capacity(replay), judge)
    return search(capacity_worlds(), judge, examples=examples, seconds=seconds, seed=seed)


def judge_capacity(cut: Cut, world: CapacityWorld, policy: DropPolicy, claims: Collection[str]) -> None:
    """Raise a `Violation`, with a picture, for the first claim that does not hold."""
    ids, weights = world.tensors()
    try:
        kept = cut(ids, weights, world.num_experts, world.capacity)
    except Exception as error:
        violation = Violation("the_program_runs_to_its_end", f"{type(error).__name__}: {error}")
        violation.__cause__ = error
    else:
        try:
            given_ids, given_weights = world.tensors()
            if "inputs_are_not_mutated" in claims and not (
                ids.equal(given_ids) and weights.equal(given_weights)
            ):
                raise Violation("inputs_are_not_mutated", "ids or weights changed")
            if "capacity_is_exact" in claims:
                capacity_is_exact(world, kept)
            if "the_right_slots_are_kept" in claims:
                the_right_slots_are_kept(world, kept, policy)
        except Violation as found:
            found.draw = partial(_picture, world, kept, policy)
            raise
        return
    violation.draw = partial(_picture, world, None, policy)
    raise violation


def capacity_is_exact(world: CapacityWorld, kept: Tensor) -> None:
    """Each expert keeps as many of its slots as fit: no place stays empty while a slot is dropped."""
    ids, _ = world.tensors()
    if kept.shape != ids.shape or kept.dtype != torch.bool:
        raise Violation(
            "capacity_is_exact", f"kept is {list(kept.shape)} {kept.dtype}, not {list(ids.shape)} bool"
        )
    for expert in range(world.num_experts):
        slots, found = int((ids == expert).sum()), int(((ids == expert) & kept).sum())
        if found != min(slots, world.capacity):
            raise Violation(
                "capacity_is_exact",
                f"expert {expert} keeps {found} of {slots} slots; the capacity is {world.capacity}",
            )


def the_right_slots_are_kept(world: CapacityWorld, kept: Tensor, policy: DropPolicy) -> None:
    """The first ones in the order of the policy."""
    for (token, choice), wanted in _wanted(world, policy).items():
        if bool(kept[token, choice]) != wanted:
            raise Violation(
                "the_right_slots_are_kept",
                f"choice {choice} of token {token} is {'dropped' if wanted else 'kept'}, but by {policy} it "
                f"is {'' if wanted else 'not '}among the first {world.capacity} of its expert",
            )


def _wanted(world: CapacityWorld, policy: DropPolicy) -> dict[tuple[int, int], bool]:
    places = [(token, choice) for token in range(len(world.ids)) for choice in range(world.topk)]
    if policy == "probability":
        places.sort(key=lambda place: -world.eighths[place[0]][place[1]])  # stable: ties stay in order
    taken = [0] * world.num_experts
    wanted = {}
    for token, choice in places:
        expert = world.ids[token][choice]
        wanted[token, choice] = taken[expert] < world.capacity
        taken[expert] += 1
    return dict(sorted(wanted.items()))


def _picture(world: CapacityWorld, kept: Tensor | None, policy: DropPolicy) -> str:
    lines = [f"world: {world.num_experts} experts, top-{world.topk}, capacity {world.capacity}, by {policy}"]
    wanted = _wanted(world, policy)
    for token, (row, eighths) in enumerate(zip(world.ids, world.eighths, strict=True)):
        slots = []
        for choice, (expert, weight) in enumerate(zip(row, eighths, strict=True)):
            right = wanted[token, choice]
            text = f"e{expert} (weight {weight / 8:g}) {'kept' if right else 'dropped'}"
            if kept is not None and kept.shape == (len(world.ids), world.topk):
                text += "" if bool(kept[token, choice]) == right else " <-- was not"
            slots.append(text)
        lines.append(f"  token {token}: {'; '.join(slots)}")
    return "\n".join(lines)
