"""State that is dealt out over the replicas makes the same updates, and is saved as whole tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isozyme.core.config import OptimConfig
from isozyme.core.errors import NonFiniteError, UsageError
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.checkpoint import load_checkpoint, save_checkpoint
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, global_norm
from isozyme.parallel.grad_packing import SLICE_UNIT
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.sharded_optimizer import ShardedOptimizer, make_optimizer
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import UNCHECKED, ShardedModel, backward, build, layouts

CONFIG = OptimConfig(lr=0.1, weight_decay=0.3, implementation="torch")
WIDE = Layout(tp=2, cp=2, dp=2, pp=1, ep=2)
Values = dict[str, torch.Tensor]


def take_steps(model, groups, buffer, optimizer, *, first: int = 0, count: int = 3) -> list[float]:
    """Clipped steps; returns the norms."""
    norms = []
    for step in range(first, first + count):
        buffer.zero()
        backward(model, groups, step)
        buffer.reduce()
        norms.append(global_norm(buffer))
        clip_(buffer, norms[-1], 50.0)
        optimizer.step(0.1 / (step + 1))
    return norms


def trained(layout: Layout, *, sharded: bool, dtype=torch.float64, count: int = 3, **options: Any):
    """Per rank: the norms, and (where it lies in the whole, value) of every parameter by name."""

    def program(world):
        groups, model = build(world, layout, dtype)
        buffer = GradientBuffer(model.parameters(), groups, sharded=sharded, **options)
        norms = take_steps(model, groups, buffer, make_optimizer(buffer, CONFIG), count=count)
        return norms, {
            (name, str(parameter.shard_spec.slices(groups.topology, world.rank))): parameter.detach()
            for name, parameter in model.by_name().items()
        }

    return simulate(Topology(layout).world_size, program)


@UNCHECKED
@settings(max_examples=12)
@given(layouts(), st.sampled_from([None, 100, 1000]))
def test_sharded_updates_equal_unsharded_ones_on_every_layout(layout, bucket_bytes):
    plain = trained(layout, sharded=False)
    for (norms, values), (want_norms, want) in zip(
        trained(layout, sharded=True, bucket_bytes=bucket_bytes), plain, strict=True
    ):
        assert norms == pytest.approx(want_norms, rel=1e-13)
        for key, value in values.items():
            torch.testing.assert_close(value, want[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_replicas_are_bitwise_equal(dtype):
    seen: dict[Any, torch.Tensor] = {}
    copies = 0
    for _, values in trained(WIDE, sharded=True, dtype=dtype):
        for key, value in values.items():
            copies += key in seen
            assert torch.equal(seen.setdefault(key, value), value)
    assert copies > 100


def test_bf16_parameters_are_rounded_from_the_same_fp32_masters():
    plain, dealt = (trained(WIDE, sharded=sharded, dtype=torch.bfloat16) for sharded in (False, True))
    for (_, values), (_, want) in zip(dealt, plain, strict=True):
        for key, value in values.items():
            torch.testing.assert_close(value, want[key], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_takes_its_share_of_the_memory_and_no_more(dtype):
    def program(world):
        groups, model = build(world, WIDE, dtype)
        buffer = GradientBuffer(model.parameters(), groups, sharded=True)
        kept = sum(tensor.nbytes for _, tensor, _ in ShardedOptimizer(buffer, CONFIG).state())
        wide = torch.promote_types(dtype, torch.float32)
        kinds = 2 if wide == dtype else 3
        share = sum(
            p.numel() / p.shard_spec.num_replicas(groups.topology) * wide.itemsize * kinds
            for p in model.parameters()
        )
        allocated = sum(b.own.stop - b.own.start for b in buffer.buckets) * wide.itemsize * kinds
        return kept, share, allocated, len(buffer.buckets) * wide.itemsize * kinds

    found = simulate(8, program)
    assert sum(kept for kept, _, _, _ in found) == sum(share for _, share, _, _ in found)
    for kept, share, allocated, unit in found:
        # Aligned starts and equal slices cost at most 64 elements a run and one unit a bucket.
        assert kept <= allocated <= share + unit * (SLICE_UNIT + 64)


def test_every_element_of_the_state_has_one_owner():
    def program(world):
        groups, model = build(world, WIDE)
        optimizer = ShardedOptimizer(GradientBuffer(model.parameters(), groups, sharded=True), CONFIG)
        return [
            (name, spec.global_shape, spec.slices(groups.topology, world.rank))
            for name, _, spec in optimizer.state()
        ]

    counts: dict[str, torch.Tensor] = {}
    for of_rank in simulate(8, program):
        for name, shape, box in of_rank:
            counts.setdefault(name, torch.zeros(shape))[box] += 1
    assert len(counts) == 2 * (1 + 2 * (5 + 16))
    assert all(bool((count == 1).all()) for count in counts.values())


def test_gradients_are_scattered_and_parameters_gathered_once_each():
    def program(world):
        groups, model = build(world, Layout(dp=4, ep=2))
        buffer = GradientBuffer(model.parameters(), groups, sharded=True)
        optimizer = ShardedOptimizer(buffer, CONFIG)
        backward(model, groups)
        before = len(world._shared.records[world.rank])
        buffer.reduce()
        optimizer.step(0.1)
        return before, [bucket.data.numel() for bucket in buffer.buckets]

    found, trace = simulate(4, program, trace=True)
    for (before, sizes), records in zip(found, trace, strict=True):
        made = [(record.kind, record.shape) for record in records[before:]]
        owners = [2 if record.group == "edp" else 4 for record in records[before : before + len(sizes)]]
        assert made == [
            *(("reduce_scatter", (size,)) for size in sizes),
            *(("all_gather", (size // count,)) for size, count in zip(sizes, owners, strict=True)),
        ]


@pytest.mark.parametrize("layout", [WIDE, Layout(tp=4, dp=2, pp=1, ep=4, etp=2), Layout(dp=2, pp=2, ep=2)])
def test_gathered_gradients_are_those_of_an_unsharded_buffer(layout):
    def program(world):
        groups, model = build(world, layout)
        other = ShardedModel(groups)
        buffers = [
            GradientBuffer(model.parameters(), groups, sharded=True, bucket_bytes=300),
            GradientBuffer(other.parameters(), groups),
        ]
        for each, buffer in zip((model, other), buffers, strict=True):
            backward(each, groups)
            buffer.reduce()
            buffer.gather()
        for name, parameter in model.by_name().items():
            torch.testing.assert_close(
                parameter.main_grad, other.by_name()[name].main_grad, rtol=1e-13, atol=0
            )

    simulate(Topology(layout).world_size, program)


def whole_state(groups, model, optimizer) -> list[Any]:
    return [*named_shards(model), *optimizer.state()]


@UNCHECKED
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((WIDE, True), (Layout(dp=2), True)), ((WIDE, True), (Layout(tp=4, dp=2, ep=2), False)),
     ((Layout(dp=2, pp=2, ep=2), False), (WIDE, True)), ((Layout(dp=3, pp=2), True), (Layout(), True))],
)  # fmt: skip
def test_a_checkpoint_goes_on_at_another_layout_sharded_or_not(tmp_path, saved, loaded, dtype):
    def save(world):
        groups, model = build(world, saved[0], dtype)
        buffer = GradientBuffer(model.parameters(), groups, sharded=saved[1])
        optimizer = make_optimizer(buffer, CONFIG)
        take_steps(model, groups, buffer, optimizer, count=2)
        save_checkpoint(tmp_path / "a", 2, whole_state(groups, model, optimizer), groups)

    def load(world):
        groups, model = build(world, loaded[0], dtype)
        optimizer = make_optimizer(GradientBuffer(model.parameters(), groups, sharded=loaded[1]), CONFIG)
        with torch.no_grad():
            for _, tensor, _ in whole_state(groups, model, optimizer):
                tensor.fill_(-1.0)
        load_checkpoint(tmp_path / "a/step_00000002", whole_state(groups, model, optimizer), groups)
        optimizer.loaded(2)
        save_checkpoint(tmp_path / "b", 2, whole_state(groups, model, optimizer), groups)

    def read(world, folder):
        groups, model = build(world, Layout(), dtype)
        optimizer = make_optimizer(GradientBuffer(model.parameters(), groups), CONFIG)
        load_checkpoint(folder / "step_00000002", whole_state(groups, model, optimizer), groups)
        return {name: tensor.detach().clone() for name, tensor, _ in whole_state(groups, model, optimizer)}

    simulate(Topology(saved[0]).world_size, save)
    simulate(Topology(loaded[0]).world_size, load)
    first, second = (read(SingleWorld(), tmp_path / folder) for folder in "ab")
    assert first.keys() == second.keys()
    assert any(name.startswith("optim.master.") for name in first) == (dtype == torch.bfloat16)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(bool((first[name] != 0).any()) for name in first)


def test_a_resumed_run_makes_the_steps_of_one_that_went_on(tmp_path):
    def program(world):
        groups, model = build(world, WIDE)
        buffer = GradientBuffer(model.parameters(), groups, sharded=True)
        optimizer = ShardedOptimizer(buffer, CONFIG)
        take_steps(model, groups, buffer, optimizer, count=2)
        save_checkpoint(tmp_path, 2, whole_state(groups, model, optimizer), groups)
        take_steps(model, groups, buffer, optimizer, first=2, count=1)
        want = {name: p.detach().clone() for name, p in model.by_name().items()}
        load_checkpoint(tmp_path / "step_00000002", whole_state(groups, model, optimizer), groups)
        optimizer.loaded(2)
        assert optimizer.updates == 2
        take_steps(model, groups, buffer, optimizer, first=2, count=1)
        return all(torch.equal(want[name], p) for name, p in model.by_name().items())

    assert all(simulate(8, program))


def test_new_weights_reach_the_masters():
    def program(world):
        groups, model = build(world, Layout(dp=2), torch.bfloat16)
        buffer = GradientBuffer(model.parameters(), groups, sharded=True)
        optimizer = ShardedOptimizer(buffer, CONFIG)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        optimizer.refresh_masters()
        buffer.reduce()
        optimizer.step(0.0)
        return all(bool((parameter == 7.0).all()) for parameter in model.parameters())

    assert all(simulate(2, program))


def test_a_rank_that_spoils_a_gradient_is_named():
    def program(world):
        groups, model = build(world, WIDE)
        buffer = GradientBuffer(model.parameters(), groups, sharded=True)
        backward(model, groups)
        if world.rank == 5:
            model.by_name()["layers.1.row"].main_grad[0, 0] = math.nan
        buffer.reduce()
        global_norm(buffer)

    with pytest.raises(NonFiniteError, match=r"Not finite on\n  - rank 5: layers\.1\.row\n"):
        simulate(8, program)


@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_refuses_the_other_kind_of_buffer(sharded):
    groups, model = build(SingleWorld(), Layout())
    buffer = GradientBuffer(model.parameters(), groups, sharded=sharded)
    with pytest.raises(UsageError, match=f"sharded={sharded}"):
        (Optimizer if sharded else ShardedOptimizer)(buffer, CONFIG)


def test_one_rank_alone_owns_everything():
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    model = ShardedModel(groups)
    buffer = GradientBuffer(model.parameters(), groups, sharded=True)
    take_steps(model, groups, buffer, ShardedOptimizer(buffer, CONFIG))
    _, want = trained(Layout(), sharded=False)[0]
    for name, parameter in model.by_name().items():
        torch.testing.assert_close(
            parameter.detach(), next(v for k, v in want.items() if k[0] == name), rtol=1e-12, atol=1e-12
        )
