"""Reductions that start while backward runs: where they start, and that they change nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from isozyme.core.errors import UsageError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.collectives import all_to_all
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.overlap import Unit, mark
from isozyme.parallel.parameters import create_parameter
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import dense_spec
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import random_tensor

DEPTH, WIDTH, PASSES = 4, 6, 3


class Layer(nn.Module):
    """Two branches of different length around a call of all ranks; on odd ranks one weight is not used."""

    def __init__(self, groups: ProcessGroups, index: int) -> None:
        super().__init__()
        self.groups = groups
        self.first, self.second, self.sometimes = (
            create_parameter(
                dense_spec(f"{index}.{name}", (WIDTH, WIDTH), Init.normal(0.5)),
                groups,
                seed=0,
                dtype=torch.float64,
            )
            for name in ("first", "second", "sometimes")
        )

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.groups["ep"].all_reduce((x.detach() @ self.first.detach()).mean())  # as a router's counts
        wide = torch.tanh(x @ self.first) @ self.second
        if self.groups.rank % 2 == 0:
            wide = wide + x @ self.sometimes
        return x + scale * wide + y


class Model(nn.Module):
    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.stem = create_parameter(
            dense_spec("stem", (WIDTH, WIDTH), Init.normal(1.0)), groups, seed=0, dtype=torch.float64
        )
        self.layers = nn.ModuleList([Layer(groups, index) for index in range(DEPTH)])

    @property
    def units(self) -> list[Unit]:
        return [Unit(entry=layer, parameters=tuple(layer.parameters())) for layer in reversed(self.layers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.stem
        for layer in self.layers:
            x = layer(x, 0.5)
        return x.square().sum()


def program(world, *, overlap: bool, sharded: bool = False, passes: int = PASSES):
    """One step; returns all gradients, and how many buckets had started after each pass."""
    groups = ProcessGroups(Topology(Layout(dp=world.size, ep=world.size)), world)
    model = Model(groups)
    units = model.units
    buffer = GradientBuffer(
        model.parameters(), groups, sharded=sharded, units=[unit.parameters for unit in units]
    )
    if overlap:
        mark(units, buffer.passed)
    buffer.expect(passes)
    started = []
    for number in range(PASSES):
        model(random_tensor("x", (5, WIDTH), world.rank, number)).backward()
        started.append(len(buffer._pending))
    buffer.reduce()
    buffer.gather()
    return {s.spec.name: s.parameter.main_grad.clone() for s in buffer.segments}, started


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_overlapped_gradients_are_bitwise_those_of_one_reduction_at_the_end(size, sharded):
    runs = [
        simulate(size, lambda world, o=o: program(world, overlap=o, sharded=sharded)) for o in (False, True)
    ]
    for (want, before), (found, after) in zip(*runs, strict=True):
        assert before == [0] * PASSES
        assert after == [0] * (PASSES - 1) + [DEPTH]
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_layers_are_reduced_between_the_calls_of_backward_on_all_ranks_alike():
    class Talking(Layer):
        def forward(self, x, scale):
            return super().forward(all_to_all(x, self.groups["ep"], [2, 2], [2, 2]), scale)

    def run(world):
        groups = ProcessGroups(Topology(Layout(dp=4, ep=2)), world)
        layers = nn.ModuleList([Talking(groups, index) for index in range(DEPTH)])
        units = [Unit(entry=layer, parameters=tuple(layer.parameters())) for layer in reversed(layers)]
        buffer = GradientBuffer(layers.parameters(), groups, units=[unit.parameters for unit in units])
        mark(units, buffer.passed)
        buffer.expect(1)
        x = random_tensor("x", (4, WIDTH), world.rank).requires_grad_()
        for layer in layers:
            x = layer(x, 0.5)
        before = len(world._shared.records[world.rank])
        x.sum().backward()
        buffer.reduce()
        return before

    firsts, trace = simulate(4, run, trace=True)
    made = [[r.kind for r in records[first:]] for first, records in zip(firsts, trace, strict=True)]
    assert made == [["all_to_all", "all_reduce"] * DEPTH] * 4


def test_each_bucket_holds_one_unit_and_units_come_in_order():
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    model = Model(groups)
    buffer = GradientBuffer(model.parameters(), groups, units=[unit.parameters for unit in model.units])
    assert [bucket.unit for bucket in buffer.buckets] == [0, 1, 2, 3, None]
    for bucket in buffer.buckets[:-1]:
        layer = DEPTH - 1 - bucket.unit
        assert {segment.spec.name[0] for segment in bucket.segments} == {str(layer)}
    ends = sorted((bucket.start, bucket.stop) for bucket in buffer.buckets)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))


def test_more_backward_passes_than_expected_are_refused():
    with pytest.raises(UsageError, match=r"came after|more backward passes"):
        program(SingleWorld(), overlap=True, passes=PASSES - 1)


def test_fewer_passes_than_expected_leave_the_work_to_the_end():
    found, started = program(SingleWorld(), overlap=True, passes=PASSES + 1)
    want, _ = program(SingleWorld(), overlap=False)
    assert started == [0] * PASSES
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_evaluation_passes_no_mark():
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    model = Model(groups)
    passed: list[int] = []
    handles = mark(model.units, passed.append)
    with torch.no_grad():
        model(torch.ones(2, WIDTH, dtype=torch.float64))
    assert passed == []
    model(torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    assert passed == [0, 1, 2, 3]
    for handle in handles:
        handle.remove()
    model(torch.ones(2, WIDTH, dtype=torch.float64)).backward()
    assert passed == [0, 1, 2, 3]


def test_a_parameter_in_two_units_is_refused():
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    model = Model(groups)
    with pytest.raises(ValueError, match="units 0 and 1"):
        GradientBuffer(model.parameters(), groups, units=[[model.stem], [model.stem]])


def test_a_marked_module_without_a_tensor_is_refused():
    module = nn.Identity()
    mark([Unit(entry=module, parameters=())], lambda _: None)
    with pytest.raises(UsageError, match=r"optim\.overlap_reduce"):
        module(None)
