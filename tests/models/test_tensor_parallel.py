"""The decoder cut over tensor-parallel ranks: ownership, traffic, replicas, and what is refused.

That losses, gradients, norms and weights equal those of one rank is in
tests/equivalence/test_families.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.batch import Batch
from isozyme.core.config import ModelConfig, MoEConfig, OptimConfig, RouterConfig, RunConfig
from isozyme.core.errors import ConfigError
from isozyme.core.genome.windows import totals_of
from isozyme.core.topology import Layout, Topology
from isozyme.launch.step import TrainStep, step_totals
from isozyme.models.decoder import Decoder, build_model
from isozyme.models.types import Chunk
from isozyme.moe.router import Router
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_layout import reduce_communicators
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.simulated import SimulatedWorld, simulate
from tests.models.common import CPU, random_batch, tiny, whole

UNCHECKED = pytest.mark.usefixtures("unchecked_annotations")
"""For many models that are only built, and for several steps; the other tests check annotations."""
LAYOUTS = [
    Layout(tp=2, dp=1),
    Layout(tp=4, dp=1),
    Layout(tp=4, dp=2, ep=4),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(tp=2, dp=2, ep=2, order="dp-ep-tp-cp-pp"),
    Layout(tp=8, dp=1, ep=4, etp=2),
]


def _config(heads: int = 8, kv_heads: int = 2, **changes: Any) -> RunConfig:
    moe = MoEConfig(ffn=24, shared_ffn=16, experts="loop", router=RouterConfig(num_experts=4, topk=2))
    sizes = {"vocab_size": 40, "num_heads": heads, "num_kv_heads": kv_heads, "moe": moe}
    return tiny(**{**sizes, **changes})


def _build(config: RunConfig, layout: Layout, world: SimulatedWorld) -> tuple[ProcessGroups, Decoder]:
    groups = ProcessGroups(Topology(layout), world)
    return groups, build_model(config, groups, Chunk.whole(config.model.num_layers), CPU, torch.float64)


def _windows_of(batch: Batch, windows: slice) -> Batch:
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dataclasses.replace(batch, **{n: v[windows] for n, v in values.items() if isinstance(v, Tensor)})


@UNCHECKED
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("kv_heads", "tied"), [(1, False), (2, True), (8, False)])
def test_every_gradient_is_summed_over_exactly_the_ranks_that_hold_the_same_shard(
    layout: Layout, kv_heads: int, tied: bool
) -> None:
    """Shards are told apart by what they hold, slice for slice; groups by who takes part in the sum."""
    topology = Topology(layout)

    def program(world: SimulatedWorld) -> dict[str, tuple[tuple[tuple[int, int], ...], int]]:
        groups, model = _build(_config(kv_heads=kv_heads, tied=tied), layout, world)
        found = {}
        for name, tensor, spec in named_shards(model):
            summed = torch.tensor(2**world.rank)
            for communicator in reduce_communicators(spec, groups):
                summed = communicator.all_reduce(summed)
            box = tuple((part.start, part.stop) for part in spec.slices(topology, world.rank))
            assert tuple(tensor.shape) == tuple(stop - start for start, stop in box)
            assert spec.num_replicas(topology) == int(summed).bit_count()
            found[name] = (box, int(summed))
        return found

    ranks = simulate(topology.world_size, program)
    for rank, own in enumerate(ranks):
        for name, (box, summed) in own.items():
            holders = [other for other, held in enumerate(ranks) if held.get(name, (None,))[0] == box]
            assert summed == sum(2**holder for holder in holders), (rank, name)


def test_neighbours_hold_the_k_v_head_that_their_query_heads_read() -> None:
    config = _config(heads=8, kv_heads=2)
    reference = {name: tensor for name, tensor, _ in named_shards(whole(config))}
    width = config.model.head_width

    def program(world: SimulatedWorld) -> None:
        _, model = _build(config, Layout(tp=4, dp=1), world)
        own = {name: tensor for name, tensor, _ in named_shards(model)}
        for head in range(2 * world.rank, 2 * world.rank + 2):
            read = head // 4  # query head n reads key head n // (N / M)
            rows = reference["layers.0.attention.k.weight"][read * width : (read + 1) * width]
            assert torch.equal(own["layers.0.attention.k.weight"], rows)

    simulate(4, program)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_one_rank_on_every_rank_and_so_are_their_gradients(tp: int, tied: bool) -> None:
    config, batch = _config(tied=tied), random_batch(vocab=40)
    reference = whole(config)
    expected = reference.logits(batch)
    expected.square().sum().backward()
    gradients = {name: tensor.grad for name, tensor, _ in named_shards(reference)}

    def program(world: SimulatedWorld) -> None:
        groups, model = _build(config, Layout(tp=tp, dp=1), world)
        logits = model.logits(batch)
        torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
        logits.square().sum().backward()
        for name, tensor, spec in named_shards(model):
            found = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for communicator in reduce_communicators(spec, groups):
                found = communicator.all_reduce(found.contiguous())
            part = gradients[name]
            assert part is not None
            part = part[spec.slices(groups.topology, world.rank)]
            torch.testing.assert_close(found, part, rtol=1e-9, atol=1e-9, msg=name)

    simulate(tp, program)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, dp=1), Layout(tp=4, dp=1), Layout(tp=2, dp=2, ep=4)], ids=str
)
def test_what_a_forward_and_backward_send_over_tp_is_what_the_docstrings_say(layout: Layout) -> None:
    """Per layer attention, and a dense network or a shared expert; the embedding, the head, and the loss."""
    config, length, windows = _config(), 16, 2
    batch = random_batch(windows * (layout.dp or 1), length, vocab=40)

    def program(world: SimulatedWorld) -> None:
        groups, model = _build(config, layout, world)
        first = groups.coordinates["dp"] * windows
        model(_windows_of(batch, slice(first, first + windows))).loss_sum.backward()

    _, trace = simulate(Topology(layout).world_size, program, trace=True)
    assert trace.difference() is None
    tp, model = layout.tp, config.model
    part = windows * length // tp * model.hidden * 8  # bytes of one rank's hidden states
    columns_and_rows = (
        2 * model.num_layers * (3 + 2)
    )  # gathered twice and scattered once; scattered, gathered
    ends = 2 + 2  # the embedding is scattered and gathered, the head's input gathered and scattered
    loss = 3 * windows * length * 8  # an all-reduce of T numbers and one of 2 T
    expected = (columns_and_rows + ends) * part * (tp - 1) + 2 * loss * (tp - 1) // tp
    for rank in range(len(trace)):
        assert trace.bytes_by_group(rank)["tp"] == expected
        counts = Counter(record.shape for record in trace[rank] if record.group == "tp+cp")
        assert counts == {(windows, 5): 2}  # the balance loss: E + 1 integers a window and expert layer


def _train(config: RunConfig, layout: Layout, steps: int) -> list[dict[str, Tensor]]:
    batches = [random_batch(4, vocab=40, seed=10 + step) for step in range(steps)]

    def program(world: SimulatedWorld) -> dict[str, Tensor]:
        groups, model = _build(config, layout, world)
        buffer = GradientBuffer(model.parameters(), groups)
        optimizer = Optimizer(buffer, OptimConfig(implementation="torch"))
        step = TrainStep(model, buffer, optimizer, groups, clip=1.0)
        share = 4 // groups.topology.size("dp")
        for batch in batches:
            own = _windows_of(batch, slice(groups.coordinates["dp"] * share, None))
            own = _windows_of(own, slice(0, share))
            step([own], step_totals(totals_of([own]), groups, CPU), 1e-2)
        return {name: tensor.detach().clone() for name, tensor, _ in named_shards(model)}

    return simulate(Topology(layout).world_size, program)


@UNCHECKED
@pytest.mark.parametrize("layout", [Layout(tp=4, dp=1), Layout(tp=2, dp=2, ep=4)], ids=str)
def test_replicas_of_routers_and_norms_stay_bitwise_equal_though_every_rank_has_other_tokens(
    layout: Layout,
) -> None:
    moved = {name: tensor for name, tensor, _ in named_shards(whole(_config()))}
    ranks = _train(_config(), layout, steps=4)
    shared = [name for name in ranks[0] if "router" in name or "norm" in name]
    assert len(shared) == 2 + 2 * 3 + 1
    for name in shared:
        assert not torch.equal(ranks[0][name], moved[name])
        for other in ranks[1:]:
            assert torch.equal(ranks[0][name], other[name]), name


def test_replicated_k_v_heads_stay_bitwise_equal_and_unlike_their_neighbours() -> None:
    ranks = _train(_config(kv_heads=2), Layout(tp=4, dp=1), steps=3)
    for name in ("layers.0.attention.k.weight", "layers.2.attention.v.weight"):
        assert torch.equal(ranks[0][name], ranks[1][name])
        assert torch.equal(ranks[2][name], ranks[3][name])
        assert not torch.equal(ranks[0][name], ranks[2][name])


def test_each_router_sees_a_tp_th_of_every_window() -> None:
    config, batch = _config(), random_batch(2, 16, vocab=40)

    def program(world: SimulatedWorld) -> list[int]:
        _, model = _build(config, Layout(tp=4, dp=1), world)
        seen: list[int] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
        output = model(batch)
        assert [routing.num_tokens for routing in output.routings] == seen
        return seen

    assert simulate(4, program) == [[8, 8]] * 4


def test_a_model_that_tp_cannot_cut_is_refused_with_every_reason_and_the_legal_values() -> None:
    model = ModelConfig(
        vocab_size=10, num_heads=6, num_kv_heads=2, ffn=8, pattern="DM", moe=MoEConfig(ffn=9, shared_ffn=5)
    )
    config = RunConfig(model=model, layout=Layout(tp=3, dp=2, etp=2))
    broken = [problem for problem in config.problems() if "tp" in problem.split(":")[0]]
    for fragment in (
        "tp must divide vocab_size: model.vocab_size=10, layout.tp=3; 10 % 3 = 1. Choose tp from 1, 2, 5, 10",
        "tp must divide ffn: model.ffn=8, layout.tp=3; 8 % 3 = 2. Choose tp from 1, 2, 4, 8",
        "tp must divide moe.shared_ffn: model.moe.shared_ffn=5, layout.tp=3; 5 % 3 = 2. Choose tp from 1, 5",
        "model.num_kv_heads=2, layout.tp=3; 2 % 3 = 2, 3 % 2 = 1. Choose tp from 1, 2, 6",
        "data.window=256, layout.tp=3, layout.cp=1; 256 % 3 = 1",
        "etp must divide moe.ffn: model.moe.ffn=9, layout.etp=2; 9 % 2 = 1. Choose etp from 1, 3, 9",
    ):
        assert any(fragment in problem for problem in broken), fragment
    assert not any("num_heads:" in problem for problem in broken)  # 6 % 3 = 0
    with pytest.raises(ConfigError, match="tp must divide vocab_size"):
        simulate(6, lambda world: _build(config, config.layout, world))


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(8, 8, 8), (8, 2, 4), (8, 1, 8), (6, 3, 6)])
def test_k_v_heads_may_be_more_or_fewer_than_the_ranks(heads: int, kv_heads: int, tp: int) -> None:
    model = ModelConfig(
        vocab_size=48, hidden=48, num_heads=heads, num_kv_heads=kv_heads, ffn=48, moe=MoEConfig(ffn=24)
    )
    config = RunConfig(model=model, layout=Layout(tp=tp, dp=1))
    assert not [problem for problem in config.problems() if "heads" in problem]


def test_a_window_that_tp_does_not_divide_is_refused_by_the_model_too() -> None:
    batch = random_batch(2, 15, vocab=40)
    with pytest.raises(ConfigError, match=r"15 % 2 = 1\. Choose tp from 1, 3, 5, 15"):
        simulate(2, lambda world: _build(_config(), Layout(tp=2, dp=1), world)[1](batch))
