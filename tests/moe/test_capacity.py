"""Capacity against a naive loop: which slots stay, over policies, factors, windows and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.capacity import DropPolicy, apply_capacity, expert_capacity, window_length
from isozyme.moe.types import Routing
from isozyme.parallel.process_groups import ProcessGroups, World
from isozyme.parallel.simulated import simulate

POLICIES: list[DropPolicy] = ["probability", "position"]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int]:
    """Skewed routing with tied weights and slots that were not kept before; also the number of windows."""
    experts = draw(st.integers(1, 5))
    topk = draw(st.integers(1, experts))
    windows = draw(st.integers(0, 3))
    tokens = windows * draw(st.integers(0, 7))
    order = st.permutations(range(experts)).map(lambda ids: ids[:topk])
    ids = draw(st.lists(order, min_size=tokens, max_size=tokens))
    slots = tokens * topk
    probs = draw(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=slots, max_size=slots))
    kept = draw(st.lists(st.sampled_from([True, True, False]), min_size=slots, max_size=slots))
    routing = Routing(
        topk_ids=torch.tensor(ids, dtype=torch.int64).view(tokens, topk),
        topk_probs=torch.tensor(probs, dtype=torch.float64).view(tokens, topk),
        kept=torch.tensor(kept, dtype=torch.bool).view(tokens, topk),
        num_experts=experts,
    )
    return routing, windows


def naive_kept(routing: Routing, windows: int, capacity: int, policy: DropPolicy) -> list[list[bool]]:
    ids, probs, kept = routing.topk_ids.tolist(), routing.topk_probs.tolist(), routing.kept.tolist()
    result = [[False] * routing.topk for _ in ids]
    length = len(ids) // windows if windows else 0
    for window in range(windows):
        for expert in range(routing.num_experts):
            slots = [
                (token, slot)
                for token in range(window * length, (window + 1) * length)
                for slot in range(routing.topk)
                if kept[token][slot] and ids[token][slot] == expert
            ]
            if policy == "probability":
                slots.sort(key=lambda at: (-probs[at[0]][at[1]], at))
            for token, slot in slots[:capacity]:
                result[token][slot] = True
    return result


@given(routings(), st.integers(0, 9), st.sampled_from(POLICIES))
def test_exactly_the_documented_slots_are_dropped(
    case: tuple[Routing, int], capacity: int, policy: DropPolicy
) -> None:
    routing, windows = case
    result = apply_capacity(routing, windows, capacity, policy)
    expected = naive_kept(routing, windows, capacity, policy)
    assert result.routing.kept.tolist() == expected
    lost = routing.local_tokens_per_expert() - result.routing.local_tokens_per_expert()
    assert torch.equal(result.dropped, lost)
    assert torch.equal(result.routing.topk_ids, routing.topk_ids)
    weights = torch.where(result.routing.kept, routing.topk_probs, torch.zeros_like(routing.topk_probs))
    assert torch.equal(result.routing.topk_probs, weights)


@given(routings(), st.sampled_from([0.01, 0.3, 1.0, 1.1, 2.0, 100.0]), st.sampled_from(POLICIES))
def test_no_expert_keeps_more_than_its_capacity_in_a_window_at_any_factor(
    case: tuple[Routing, int], factor: float, policy: DropPolicy
) -> None:
    routing, windows = case
    length = window_length(routing.num_tokens, windows)
    capacity = expert_capacity(factor, topk=routing.topk, window=length, num_experts=routing.num_experts)
    kept = apply_capacity(routing, windows, capacity, policy).routing
    for window in range(windows):
        rows = slice(window * length, (window + 1) * length)
        for expert in range(routing.num_experts):
            assert int((kept.kept & (kept.topk_ids == expert))[rows].sum()) <= capacity
    if factor * routing.topk >= routing.num_experts:
        assert torch.equal(kept.kept, routing.kept)


def test_a_dropped_slot_gets_no_gradient_and_a_kept_one_all_of_it() -> None:
    probs = torch.tensor([[0.9], [0.5], [0.7]], dtype=torch.float64, requires_grad=True)
    routing = Routing(
        topk_ids=torch.zeros(3, 1, dtype=torch.int64),
        topk_probs=probs,
        kept=torch.ones(3, 1, dtype=torch.bool),
        num_experts=2,
    )
    result = apply_capacity(routing, 1, 2, "probability")
    (result.routing.topk_probs * torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
    assert probs.grad is not None
    assert probs.grad.flatten().tolist() == [1.0, 0.0, 100.0]


def test_nan_weights_are_kept_so_that_they_stay_visible() -> None:
    routing = Routing(
        topk_ids=torch.zeros(3, 1, dtype=torch.int64),
        topk_probs=torch.tensor([[0.9], [torch.nan], [0.7]]),
        kept=torch.ones(3, 1, dtype=torch.bool),
        num_experts=2,
    )
    kept = apply_capacity(routing, 1, 1, "probability").routing.kept
    assert kept.flatten().tolist() == [False, True, False]


def test_capacity_of_one_window_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(24, 5, generator=generator).pow(3).topk(2).indices
    probs = torch.rand(24, 2, generator=generator)
    kept = torch.ones(24, 2, dtype=torch.bool)
    whole = Routing(topk_ids=ids, topk_probs=probs, kept=kept, num_experts=5)
    together = apply_capacity(whole, 4, 2, "probability")
    for window in range(4):
        rows = slice(window * 6, (window + 1) * 6)
        part = Routing(topk_ids=ids[rows], topk_probs=probs[rows], kept=kept[rows], num_experts=5)
        alone = apply_capacity(part, 1, 2, "probability")
        assert torch.equal(together.routing.kept[rows], alone.routing.kept)
    assert int(together.dropped.sum()) > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(tp=2, cp=2), Layout(tp=2, cp=2, dp=2)])
@pytest.mark.parametrize("zigzag", [False, True])
def test_windows_cut_over_ranks_drop_the_same_slots_as_whole_ones(
    policy: DropPolicy, layout: Layout, zigzag: bool
) -> None:
    topology = Topology(layout)
    windows, length, parts = 3, 8, layout.tp * layout.cp
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(windows, length, 5, generator=generator).pow(3).topk(2).indices
    probs = torch.randint(1, 4, (windows, length, 2), generator=generator) / 8  # many ties
    kept = torch.rand(windows, length, 2, generator=generator) < 0.9

    def routing(at: torch.Tensor) -> Routing:
        flat = [x[:, at].flatten(0, 1) for x in (ids, probs, kept)]
        return Routing(topk_ids=flat[0], topk_probs=flat[1], kept=flat[2], num_experts=5)

    whole = apply_capacity(routing(torch.arange(length)), windows, 2, policy)
    expected = whole.routing.kept.view(windows, length, 2)

    def rank(world: World) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = ProcessGroups(topology, world)
        share = groups.coordinates["cp"] * layout.tp + groups.coordinates["tp"]
        at = torch.arange(length).view(parts, -1)[share]
        positions = None
        if zigzag:
            at = torch.arange(length).view(-1, parts)[:, share].flip(0)
            positions = at.repeat(windows)
        result = apply_capacity(routing(at), windows, 2, policy, groups=groups, positions=positions)
        return at, result.routing.kept.view(windows, -1, 2), result.dropped

    results = simulate(topology.world_size, rank)
    for at, ours, _ in results:
        assert torch.equal(ours, expected[:, at])
    total = torch.stack([dropped for _, _, dropped in results[:]]).sum(0)
    assert torch.equal(total, whole.dropped * topology.size("dp"))


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 300), st.integers(1, 64))
@example(110, 2, 100, 10)
def test_capacity_is_the_exact_ceiling_of_the_decimal_factor(
    hundredths: int, topk: int, window: int, experts: int
) -> None:
    exact = -(-hundredths * topk * window // (100 * experts))
    assert expert_capacity(hundredths / 100, topk=topk, window=window, num_experts=experts) == exact
    assert abs(exact - math.ceil(hundredths / 100 * topk * window / experts)) <= 1


def test_tokens_that_are_not_whole_windows_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_tokens=7, windows=2"):
        window_length(7, 2)
    with pytest.raises(ConfigError, match="num_tokens=7, windows=0"):
        window_length(7, 0)
