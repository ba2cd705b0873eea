"""Worlds print as lines that make them again, and nothing in them is equal by chance."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from isozyme.core.errors import UsageError
from isozyme.moe.testing import (
    CapacityWorld,
    LayerPromises,
    LayerWorld,
    Promises,
    RouterPromises,
    RouterWorld,
    World,
    capacity_worlds,
    layer_worlds,
    parse,
    parse_capacity,
    parse_layer,
    parse_router,
    router_worlds,
    worlds,
)
from isozyme.moe.testing.inputs import arranged, dealt, inputs_of
from isozyme.moe.testing.schedule import schedule_from
from isozyme.moe.testing.world import checked

EVERYTHING = Promises(drops=True, etp=True)
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@given(worlds(EVERYTHING))
def test_a_world_is_legal_and_its_line_makes_it_again(world: World) -> None:
    assert checked(world) is world
    assert parse(world.line()) == world


@given(router_worlds(RouterPromises(groups=True)))
def test_a_router_world_is_legal_and_its_line_makes_it_again(world: RouterWorld) -> None:
    assert world.config.problems() == []
    assert parse_router(world.line()) == world


@given(capacity_worlds())
def test_the_line_of_a_capacity_world_makes_it_again(world: CapacityWorld) -> None:
    assert parse_capacity(world.line()) == world


@given(layer_worlds(LayerPromises(split_windows=True)))
def test_the_line_of_a_layer_world_makes_it_again(world: LayerWorld) -> None:
    assert parse_layer(world.line()) == world


@pytest.mark.parametrize("read", [parse_router, parse_capacity, parse_layer])
def test_another_line_is_refused(read: object) -> None:
    with pytest.raises(UsageError, match="a replay line must be one that a violation printed"):
        read("experts=2 topk=1")  # type: ignore[operator]


@given(worlds(EVERYTHING))
def test_no_two_tokens_weights_or_gradients_of_a_world_are_equal(world: World) -> None:
    inputs = inputs_of(world)
    tokens = [tuple(row) for part in inputs for row in part.tokens.tolist()]
    assert len(set(tokens)) == len(tokens)
    assert all(value != 0 for row in tokens for value in row)
    weights = [w for part in inputs for w in part.weights.flatten().tolist() if w]
    assert len(set(weights)) == len(weights)
    if world.dtype == "float64":
        upstream = [tuple(row) for part in inputs for row in part.upstream.tolist()]
        assert len(set(upstream)) == len(upstream)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_payloads_are_exact_in_every_dtype(dtype: str) -> None:
    world = World(
        ids=(((0,),) * 64,) * 8, dtype=dtype, layout=parse("dp=8 experts=1 topk=1 ids=|||||||").layout
    )
    for part in inputs_of(world):
        assert part.tokens.double().frac().eq(0).all()
        assert len({tuple(row) for row in part.tokens.tolist()}) == 64


@pytest.mark.parametrize("memory", ["transposed", "sliced", "expanded"])
def test_memory_layouts_differ_and_hold_the_same_values(memory: str) -> None:
    values = torch.arange(6.0).view(3, 2)
    other = arranged(values, memory)  # type: ignore[arg-type]
    assert other.stride() != values.stride()
    assert other[:, 0].equal(values[:, 0])
    assert memory == "expanded" or other.equal(values)


def test_dealing_to_other_ranks_keeps_order_and_values() -> None:
    inputs = inputs_of(parse("dp=3 ep=3 experts=3 topk=1 ids=0,1||2,0,1"))
    moved = dealt(inputs, 2)
    assert [len(part.origins) for part in moved] == [3, 2]
    for name in ("tokens", "ids", "weights", "upstream"):
        assert torch.cat([getattr(p, name) for p in moved]).equal(
            torch.cat([getattr(p, name) for p in inputs])
        )


def reached(condition: object, *, shrink: bool) -> World:
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    quiet = settings(max_examples=3000, database=None, deadline=None, phases=phases)
    return find(worlds(EVERYTHING), condition, settings=quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("promise", "condition"),
    [
        ("an empty rank among full ones", lambda w: 0 in map(len, w.ids) and max(map(len, w.ids)) > 0),
        ("many tokens", lambda w: max(map(len, w.ids)) > 16),
        ("K = E", lambda w: w.topk == w.num_experts > 1),
        ("an expert without tokens", lambda w: len({e for p in w.ids for r in p for e in r}) < w.num_experts),
        (
            "all to one rank of several",
            lambda w: (
                w.ranks > 1
                and w.layout.ep > 1
                and all(e < w.num_experts // w.layout.ep for p in w.ids for r in p for e in r)
                and any(w.ids)
            ),
        ),
        (
            "all slots dropped",
            lambda w: len(w.dropped) > 3 and len(w.dropped) == sum(map(len, w.ids)) * w.topk,
        ),
        ("a weight of zero", lambda w: w.zero),
        ("ETP with EP", lambda w: w.layout.etp > 1 and w.layout.ep > 1),
        (
            "EP ranks that are not neighbours",
            lambda w: any(b - a > 1 for g in w.groups() for a, b in pairwise(g)),
        ),
        ("strides of zero", lambda w: w.memory == "expanded"),
        ("bf16", lambda w: w.dtype == "bfloat16"),
        ("a schedule of choices", lambda w: isinstance(w.schedule, tuple) and len(w.schedule) > 4),
        ("a seeded schedule", lambda w: isinstance(w.schedule, int)),
        ("a late rank", lambda w: w.delay is not None),
    ],
)
def test_the_strategy_reaches(promise: str, condition: object) -> None:
    reached(condition, shrink=False)


def test_worlds_shrink_to_few_ranks_and_tokens_and_to_turns() -> None:
    world = reached(lambda w: sum(map(len, w.ids)) >= 2 and w.layout.ep >= 2, shrink=True)
    assert world.line() in ("dp=2 ep=2 experts=2 topk=1 ids=|0,0", "dp=2 ep=2 experts=2 topk=1 ids=0|0")


@given(st.lists(st.integers(0, 9)).map(tuple), st.lists(st.integers(1, 4), max_size=20))
def test_a_list_of_choices_always_names_a_rank_that_may_run(
    choices: tuple[int, ...], sizes: list[int]
) -> None:
    schedule = schedule_from(choices)
    for size in sizes:
        ready = list(range(0, 2 * size, 2))
        assert schedule(ready) in ready
