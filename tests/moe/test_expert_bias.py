"""The balance bias: its update rule, its precision under casts, its storage, and its sum over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isozyme.core.config import RouterConfig
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.expert_bias import bias_step, update_expert_bias, update_expert_biases
from isozyme.moe.router import Router
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World
from isozyme.parallel.shard_spec import named_shards, spec_of
from isozyme.parallel.simulated import simulate


def single_groups() -> ProcessGroups:
    return ProcessGroups(Topology(Layout()), SingleWorld())


def biased_router(
    groups: ProcessGroups | None = None, *, rate: float = 0.001, dtype: torch.dtype = torch.float32
) -> Router:
    config = RouterConfig(num_experts=4, topk=2, expert_bias_rate=rate)
    return Router(config, name="m.router", hidden=6, groups=groups or single_groups(), seed=0, dtype=dtype)


def bias_of(router: Router) -> torch.Tensor:
    assert router.expert_bias is not None
    return router.expert_bias


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
def test_the_bias_moves_against_the_load_by_one_rate(counts: list[int]) -> None:
    step = bias_step(torch.zeros(len(counts)), torch.tensor(counts), 0.5)
    mean = [sum(counts) - len(counts) * count for count in counts]
    assert step.tolist() == [0.5 * ((m > 0) - (m < 0)) for m in mean]


def test_updates_add_up_in_place() -> None:
    router = biased_router()
    before = bias_of(router).data_ptr()
    for counts in ([9, 1, 2, 4], [4, 4, 4, 4], [0, 0, 0, 0], [0, 9, 1, 2]):
        update_expert_bias(router, torch.tensor(counts), router.groups, rate=0.25)
    assert bias_of(router).tolist() == [0.0, 0.0, 0.5, 0.25]
    assert bias_of(router).data_ptr() == before


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_leave_the_bias_bits_storage_and_spec(cast: torch.dtype) -> None:
    router = biased_router()
    bias = bias_of(router)
    bias.copy_(torch.tensor([1e-3, 0.1, 1 / 3, 1 + 2**-20]))
    values, place = bias.clone(), bias.data_ptr()
    nn.Sequential(router).to(cast)
    assert router.weight.dtype == cast
    assert torch.equal(bias_of(router), values)
    assert bias_of(router).data_ptr() == place
    assert spec_of(bias_of(router)).name == "m.router.expert_bias"


def test_double_widens_the_bias_and_keeps_its_spec() -> None:
    router = biased_router().double()
    assert bias_of(router).dtype == torch.float64
    assert [name for name, _, _ in named_shards(router)] == ["m.router.weight", "m.router.expert_bias"]
    assert bias_of(biased_router(dtype=torch.bfloat16)).dtype == torch.float32
    assert bias_of(biased_router(dtype=torch.float64)).dtype == torch.float64
    assert bias_of(router.bfloat16()).dtype == torch.float32
    assert router.to("meta").expert_bias is not None
    assert spec_of(bias_of(router)).kind == "buffer"


def test_save_and_load_are_bitwise_and_keep_the_storage() -> None:
    source, target = biased_router(), biased_router()
    bias_of(source).copy_(torch.randn(4))
    place = bias_of(target).data_ptr()
    target.load_state_dict(source.state_dict())
    assert torch.equal(bias_of(target), bias_of(source))
    assert bias_of(target).data_ptr() == place
    assert spec_of(bias_of(target)).name == "m.router.expert_bias"


def test_a_router_without_bias_is_refused() -> None:
    router = biased_router(rate=0.0)
    with pytest.raises(ConfigError, match="expert_bias_rate"):
        update_expert_bias(router, torch.zeros(4, dtype=torch.int64), router.groups, rate=0.1)
    with pytest.raises(ConfigError, match="len\\(modules\\)=1, len\\(routed\\)=0"):
        update_expert_biases([biased_router()], [], router.groups, rate=0.1)


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(tp=2, cp=2), Layout(tp=2, dp=2, ep=2)])
def test_counts_are_summed_over_ranks_and_biases_stay_equal(layout: Layout) -> None:
    topology = Topology(layout)
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 50, (topology.world_size, 2, 4), generator=generator)

    def rank(world: World) -> torch.Tensor:
        groups = ProcessGroups(topology, world)
        routers = [biased_router(groups), biased_router(groups)]
        mine = counts[groups.rank].clone()
        update_expert_biases(routers, list(mine), groups, rate=0.5)
        assert torch.equal(mine, counts[groups.rank])
        return torch.stack([bias_of(router).clone() for router in routers])

    expected = bias_step(torch.zeros(2, 4), counts.sum(0), 0.5)
    for biases in simulate(topology.world_size, rank):
        assert torch.equal(biases, expected)
