"""Shards tile their global tensor, replicas are counted, and each unique shard has one writer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import (
    ShardSpec,
    attach,
    boxes_of_range,
    dense_spec,
    named_shards,
    spec_of,
)
from tests.parallel.sharded_model import PARTIAL, ShardedModel, global_specs, holds, layouts


@settings(max_examples=30)
@given(layouts(most=16))
def test_writers_tile_every_global_tensor_exactly_once(layout):
    topology = Topology(layout)
    for spec, stages, expert in global_specs(topology.size("pp"), topology.size("tp")):
        covered = torch.zeros(spec.global_shape, dtype=torch.int64)
        for rank in range(topology.world_size):
            if holds(topology, rank, stages, expert) and spec.is_writer(topology, rank):
                covered[spec.slices(topology, rank)] += 1
        assert (covered == 1).all(), spec.name


@settings(max_examples=30)
@given(layouts(most=16))
def test_num_replicas_is_how_many_ranks_hold_each_element(layout):
    topology = Topology(layout)
    for spec, stages, expert in global_specs(topology.size("pp"), topology.size("tp")):
        held = torch.zeros(spec.global_shape, dtype=torch.int64)
        for rank in range(topology.world_size):
            if holds(topology, rank, stages, expert):
                held[spec.slices(topology, rank)] += 1
        assert (held == spec.num_replicas(topology)).all(), spec.name


@settings(max_examples=20)
@given(layouts())
def test_local_shape_is_that_of_every_rank_s_slices(layout):
    topology = Topology(layout)
    for spec, _, _ in global_specs(topology.size("pp"), topology.size("tp")):
        for rank in range(topology.world_size):
            shape = tuple(part.stop - part.start for part in spec.slices(topology, rank))
            assert shape == spec.local_shape(topology)
        assert spec.local_numel(topology) == torch.Size(shape).numel()


@pytest.mark.parametrize(("pp", "replicas", "writers"), [(1, 1, [0]), (2, 2, [0]), (4, 2, [0])])
def test_a_tied_embedding_has_a_copy_on_the_first_and_the_last_stage(pp, replicas, writers):
    spec = ShardSpec(
        name="embedding", global_shape=(4, 2), replicas={"embedding": "partial"}, init=Init.normal(1.0)
    )
    topology = Topology(Layout(pp=pp))
    assert spec.num_replicas(topology) == replicas
    assert [rank for rank in {0, pp - 1} if spec.is_writer(topology, rank)] == writers


def test_reduce_axes_are_the_partial_ones():
    spec = ShardSpec(
        name="w", global_shape=(2,), replicas={**PARTIAL, "tp": "identical"}, init=Init.constant(0)
    )
    assert spec.reduce_axes == ("cp", "dp")
    assert spec.num_replicas(Topology(Layout(tp=2, dp=3))) == 6


def test_a_dim_that_an_axis_does_not_divide_is_refused():
    spec = ShardSpec(name="w", global_shape=(5, 2), split=((0, "tp"),), init=Init.constant(0))
    with pytest.raises(ValueError, match="w: dim 0 of size 5 is not divisible by tp=2"):
        spec.slices(Topology(Layout(tp=2)), 0)


def test_a_tensor_without_a_spec_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\) has no ShardSpec"):
        spec_of(torch.zeros(3))


def test_named_shards_gives_parameters_and_buffers_with_a_spec_once():
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    module.again = module.weight  # a tied weight
    module.register_buffer("bias", torch.zeros(3))
    module.register_buffer("cache", torch.zeros(4))
    attach(module.weight, dense_spec("w", (2,), Init.constant(0.0)))
    attach(module.bias, dense_spec("b", (3,), Init.constant(0.0)))
    assert [(name, tuple(tensor.shape)) for name, tensor, _ in named_shards(module)] == [
        ("w", (2,)),
        ("b", (3,)),
    ]


def test_a_parameter_without_a_spec_is_not_passed_over():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no ShardSpec"):
        list(named_shards(module))


def test_every_parameter_of_a_model_has_a_name_of_its_own():
    model = ShardedModel(ProcessGroups(Topology(Layout()), SingleWorld()))
    names = [name for name, _, _ in named_shards(model)]
    assert len(names) == len(set(names)) == len(global_specs())


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = torch.arange(size).view(shape)
    boxes = list(boxes_of_range(tuple(shape), start, stop))
    assert [int(n) for box in boxes for n in numbers[box].flatten()] == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
