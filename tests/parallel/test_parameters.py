"""The global model does not depend on the layout: dense copies are equal, experts are not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from isozyme.core.initialisation import Init, initial_shard
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.parameters import create_parameter, local_initial_value
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import ShardSpec, dense_spec, spec_of
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import UNCHECKED, build, global_specs, layouts


def whole(spec: ShardSpec) -> torch.Tensor:
    slices = tuple(slice(0, size) for size in spec.global_shape)
    return initial_shard(
        name=spec.name, global_shape=spec.global_shape, slices=slices, init=spec.init, seed=0
    )


@UNCHECKED
@settings(max_examples=15)
@given(layouts())
def test_every_shard_is_the_slice_of_the_same_whole_at_every_layout(layout):
    want = {spec.name: whole(spec).double() for spec, _, _ in global_specs()}

    def program(world):
        groups, model = build(world, layout)
        for name, parameter in model.by_name().items():
            assert torch.equal(
                parameter, want[name][parameter.shard_spec.slices(groups.topology, world.rank)]
            )
        return set(model.by_name())

    assert set().union(*simulate(Topology(layout).world_size, program)) == set(want)


def test_experts_differ_from_each_other_and_from_layer_to_layer():
    values = [whole(spec).flatten() for spec, _, _ in global_specs() if spec.name.endswith("gate_up")]
    assert len({tuple(value.tolist()) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("dtype", "min_dtype", "kept"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_a_parameter_has_the_dtype_asked_for_but_at_least_that_of_its_spec(dtype, min_dtype, kept):
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    spec = ShardSpec(name="w", global_shape=(3, 2), init=Init.normal(1.0), min_dtype=min_dtype)
    parameter = create_parameter(spec, groups, seed=0, dtype=dtype)
    assert parameter.dtype == kept
    assert parameter.requires_grad
    assert spec_of(parameter) is spec
    torch.testing.assert_close(parameter.detach(), whole(spec).to(kept), rtol=0, atol=0)


def test_the_seed_changes_every_random_value():
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    spec = ShardSpec(name="w", global_shape=(8, 8), init=Init.normal(1.0))
    one, other = (
        local_initial_value(spec, groups, seed=seed, device="cpu", dtype=torch.float32) for seed in (0, 1)
    )
    assert not (one == other).any()


def test_without_a_seed_only_constants_are_set():
    alone = ProcessGroups(Topology(Layout()), SingleWorld())
    options = {"seed": None, "device": "cpu", "dtype": torch.bfloat16}
    random = local_initial_value(dense_spec("w", (2, 3), Init.normal(1.0)), alone, **options)
    assert random.shape == (2, 3)
    constant = local_initial_value(dense_spec("g", (3,), Init.constant(1.0)), alone, **options)
    assert constant.tolist() == [1.0, 1.0, 1.0]
    assert constant.dtype == torch.bfloat16
