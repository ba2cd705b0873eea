"""Parameters gathered while the next forward runs: when, in which order, and that it changes no bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import UsageError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.gather_overlap import gather_ahead
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.overlap import Unit
from isozyme.parallel.parameters import create_parameter
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import dense_spec, named_shards
from isozyme.parallel.sharded_optimizer import ShardedOptimizer
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import random_tensor

CONFIG = OptimConfig(lr=0.1, weight_decay=0.1, implementation="torch")
WIDTH, DEPTH = 6, 3


class Part(nn.Module):
    """One weight; `log` gets a line when it is used."""

    def __init__(self, groups: ProcessGroups, name: str, dtype: torch.dtype, log: list[str]) -> None:
        super().__init__()
        spec = dense_spec(name, (WIDTH, WIDTH), Init.normal(0.3))
        self.weight, self.name, self.log = create_parameter(spec, groups, seed=0, dtype=dtype), name, log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(f"use {self.name}")
        return torch.tanh(x @ self.weight) + x


class Model(nn.Module):
    def __init__(self, groups: ProcessGroups, dtype: torch.dtype) -> None:
        super().__init__()
        self.log: list[str] = []
        self.stem = Part(groups, "stem", dtype, self.log)
        self.layers = nn.ModuleList([Part(groups, str(index), dtype, self.log) for index in range(DEPTH)])

    @property
    def units(self) -> list[Unit]:
        return [Unit(entry=layer, parameters=tuple(layer.parameters())) for layer in reversed(self.layers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Early(Model):
    """Its first layer looks at the weight of the last one: not what the units say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + x @ self.layers[-1].weight.detach())


Trained = tuple[ShardedOptimizer, Model, ProcessGroups, list[str]]


def setup(world, *, ahead: bool, kind: type[Model] = Model, dtype=torch.float64) -> Trained:
    groups = ProcessGroups(Topology(Layout(dp=world.size, ep=1)), world)
    model = kind(groups, dtype)
    units = model.units
    buffer = GradientBuffer(model.parameters(), groups, sharded=True, units=[u.parameters for u in units])
    optimizer = ShardedOptimizer(buffer, CONFIG)
    if ahead:
        gather_ahead(optimizer, units, [model])
    for share in optimizer._shares:
        _noted(share, model.log)
    return optimizer, model, groups, model.log


def _noted(share, log: list[str]) -> None:
    """Write a line when a gather starts, and when it is finished."""
    name = share.bucket.segments[0].spec.name
    start, finish = share.start_gather, share.finish_gather
    share.start_gather = lambda copied: (log.append(f"start {name}"), start(copied=copied))[1]
    share.finish_gather = lambda: (log.append(f"finish {name}"), finish())[1]


def take_step(trained: Trained, step: int) -> None:
    optimizer, model, groups, _ = trained
    optimizer.buffer.zero()
    for micro_batch in range(2):
        x = random_tensor("x", (4, WIDTH), step, micro_batch, groups.rank).clamp(-2, 2)
        model(x.to(model.stem.weight.dtype)).square().sum().backward()
    optimizer.buffer.reduce()
    optimizer.step(0.1)


def weights_after(size: int, steps: int = 3, **options) -> Sequence[dict[str, torch.Tensor]]:
    def program(world):
        trained = setup(world, **options)
        for step in range(steps):
            take_step(trained, step)
        trained[0].finish()
        return {name: tensor.detach().clone() for name, tensor, _ in named_shards(trained[1])}

    return simulate(size, program)


def equal(some: Sequence[dict[str, torch.Tensor]], others: Sequence[dict[str, torch.Tensor]]) -> bool:
    return all(
        torch.equal(one[name], other[name]) for one, other in zip(some, others, strict=True) for name in one
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gathering_ahead_changes_no_bit(size, dtype):
    found, want = (weights_after(size, ahead=ahead, dtype=dtype) for ahead in (True, False))
    assert equal(found, want)
    assert all(equal([found[0]], [other]) for other in found)


def test_a_layer_that_is_read_before_it_is_finished_shows():
    assert not equal(weights_after(2, ahead=True, kind=Early), weights_after(2, ahead=False, kind=Early))


def test_gathers_start_in_forward_order_and_each_layer_waits_for_its_own_alone():
    def program(world):
        trained = setup(world, ahead=True)
        take_step(trained, 0)
        trained[3].clear()
        take_step(trained, 1)
        seen = list(trained[3])
        trained[0].finish()
        return seen

    layers = [str(index) for index in range(DEPTH)]
    first = [line for name in ("stem", *layers) for line in (f"finish {name}", f"use {name}")]
    second = [f"use {name}" for name in ("stem", *layers)]
    starts = [f"start {name}" for name in ("stem", *layers)]
    assert simulate(2, program) == [[*first, *second, *starts]] * 2


def test_all_ranks_start_the_same_gathers_before_the_forward_and_make_no_other_call_in_it():
    def program(world):
        trained = setup(world, ahead=True)
        take_step(trained, 0)
        before = len(world._shared.records[world.rank])
        trained[1](torch.ones(2, WIDTH, dtype=torch.float64))
        return before

    befores, trace = simulate(4, program, trace=True)
    for before, records in zip(befores, trace, strict=True):
        last = [record.kind for record in records[before - DEPTH - 1 : before]]
        assert last == ["all_gather"] * (DEPTH + 1)
        assert len(records) == before


@pytest.mark.parametrize(
    "finishing",
    [
        lambda optimizer, model: optimizer.finish(),
        lambda optimizer, model: list(optimizer.state()),
        lambda optimizer, model: optimizer.loaded(1),
        lambda optimizer, model: model(torch.ones(2, WIDTH, dtype=torch.float64)),
    ],
)
def test_readers_are_refused_until_the_gathers_are_finished(finishing):
    def program(world):
        trained = setup(world, ahead=True)
        take_step(trained, 0)
        with pytest.raises(UsageError, match="stem is still being gathered"):
            list(named_shards(trained[1]))
        with torch.no_grad():
            finishing(trained[0], trained[1])
        return {name: tensor.detach().clone() for name, tensor, _ in named_shards(trained[1])}

    assert equal(simulate(2, program), weights_after(2, steps=1, ahead=False))


def test_a_second_update_without_a_forward_in_between_finishes_the_first():
    def program(world):
        trained = setup(world, ahead=True)
        take_step(trained, 0)
        trained[0].step(0.1)
        trained[0].finish()
        return {name: tensor.detach().clone() for name, tensor, _ in named_shards(trained[1])}

    def twin(world):
        trained = setup(world, ahead=False)
        take_step(trained, 0)
        trained[0].step(0.1)
        return {name: tensor.detach().clone() for name, tensor, _ in named_shards(trained[1])}

    assert equal(simulate(2, program), simulate(2, twin))
