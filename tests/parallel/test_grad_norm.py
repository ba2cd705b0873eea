"""The norm is that of the whole model, wherever its shards are kept, and clipping is one number."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from isozyme.core.config import OptimConfig
from isozyme.core.errors import NonFiniteError, UsageError
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, global_norm
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import UNCHECKED, backward, build, global_gradients, layouts


def gathered_norm(layout: Layout) -> float:
    """The oracle: the norm of all whole gradients together."""
    return math.sqrt(sum(float(g.square().sum()) for g in global_gradients(Topology(layout)).values()))


def reduced_buffer(world, layout):
    groups, model = build(world, layout)
    buffer = GradientBuffer(model.parameters(), groups)
    backward(model, groups)
    buffer.reduce()
    return buffer, model


@UNCHECKED
@settings(max_examples=15)
@given(layouts())
def test_the_norm_is_that_of_the_gathered_gradients_on_every_layout(layout):
    norms = simulate(Topology(layout).world_size, lambda world: global_norm(reduced_buffer(world, layout)[0]))
    assert len(set(norms)) == 1  # the same bits on all ranks
    assert norms[0] == pytest.approx(gathered_norm(layout), rel=1e-12)


@pytest.mark.parametrize(
    "fault", ["every replica counts whole", "experts of one rank only", "mean over ranks"]
)
def test_the_oracle_refuses_wrong_norms(fault):
    layout = Layout(tp=2, dp=2, ep=4)

    def wrong(world):
        buffer, _ = reduced_buffer(world, layout)
        everyone = buffer.groups.world
        square = torch.zeros(1, dtype=torch.float64)
        for group in buffer.flat:
            weight = 1.0 if fault == "every replica counts whole" else 1 / group.num_replicas
            if fault == "experts of one rank only" and group.name.startswith("expert") and world.rank:
                weight = 0.0
            square += group.data.square().sum() * weight
        if fault == "mean over ranks":
            return float(everyone.all_reduce(square.sqrt())) / everyone.size
        return float(everyone.all_reduce(square).sqrt())

    assert simulate(4, wrong)[0] != pytest.approx(gathered_norm(layout), rel=1e-2)


@UNCHECKED
@settings(max_examples=8)
@given(layouts(most=4))
def test_clipping_multiplies_every_gradient_by_one_coefficient(layout):
    want = global_gradients(Topology(layout))
    limit = gathered_norm(layout) / 7

    def program(world):
        buffer, _ = reduced_buffer(world, layout)
        coefficient = clip_(buffer, global_norm(buffer), limit)
        for segment in buffer.segments:
            local = want[segment.spec.name][segment.spec.slices(buffer.groups.topology, world.rank)]
            torch.testing.assert_close(segment.parameter.main_grad, local / 7, rtol=1e-12, atol=0)
        return coefficient, global_norm(buffer)

    for coefficient, after in simulate(Topology(layout).world_size, program):
        assert coefficient == pytest.approx(1 / 7, rel=1e-12)
        assert after == pytest.approx(limit, rel=1e-12)


@pytest.mark.parametrize("limit", [0.0, 1e9])
def test_clipping_leaves_a_small_gradient_alone(limit):
    def program(world):
        buffer, _ = reduced_buffer(world, Layout())
        before = [group.data.clone() for group in buffer.flat]
        assert clip_(buffer, global_norm(buffer), limit) == 1.0
        return all(torch.equal(a, group.data) for a, group in zip(before, buffer.flat, strict=True))

    assert simulate(1, program) == [True]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["layers.0.norm", "layers.1.experts.5.down"])
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks_and_no_weight_changes(value, tensor):
    layout = Layout(tp=2, dp=2, ep=2)
    topology = Topology(layout)

    def program(world):
        groups, model = build(world, layout)
        buffer = GradientBuffer(model.parameters(), groups)
        Optimizer(buffer, OptimConfig())
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, groups)
        if tensor in model.by_name() and topology.coordinates(world.rank)["dp"] == 1:
            model.by_name()[tensor].main_grad.view(-1)[0] = value
        buffer.reduce()
        with pytest.raises(NonFiniteError) as caught:
            global_norm(buffer)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return tensor in model.by_name() and topology.coordinates(world.rank)["dp"] == 1, str(caught.value)

    found = simulate(4, program)
    assert len({message for _, message in found}) == 1
    for rank, (blamed, message) in enumerate(found):
        # The sum has spread the value to all replicas, but only its origin is blamed.
        assert (f"rank {rank}: {tensor}" in message) == blamed


def test_an_overflow_of_finite_gradients_is_said_to_be_one():
    def program(world):
        buffer, _ = reduced_buffer(world, Layout())
        buffer.flat[0].data.fill_(1e200)
        global_norm(buffer)

    with pytest.raises(NonFiniteError, match="overflowed"):
        simulate(1, program)


def test_the_norm_of_a_part_is_refused():
    def program(world):
        groups, model = build(world, Layout())
        global_norm(GradientBuffer(model.parameters(), groups))

    with pytest.raises(UsageError, match="reduce"):
        simulate(1, program)
