"""Gradients are summed over the ranks that have a part of them, once, in the same order everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isozyme.core.errors import CommunicationError, ConfigError, UsageError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import attach, dense_spec
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import UNCHECKED, backward, build, global_gradients, layouts


def worst_error(buffer: GradientBuffer, want: dict[str, torch.Tensor]) -> float:
    """The largest relative error of any tensor's gradient on this rank."""
    topology, rank = buffer.groups.topology, buffer.groups.rank
    errors = []
    for segment in buffer.segments:
        whole = want[segment.spec.name]
        local = whole[segment.spec.slices(topology, rank)]
        errors.append(float((segment.parameter.main_grad - local).norm() / whole.norm()))
    return max(errors, default=0.0)


def reduced(layout: Layout, **options: Any) -> list[float]:
    want = global_gradients(Topology(layout))

    def program(world):
        groups, model = build(world, layout)
        buffer = GradientBuffer(model.parameters(), groups, **options)
        backward(model, groups)
        buffer.reduce()
        return worst_error(buffer, want)

    return simulate(Topology(layout).world_size, program)


@UNCHECKED
@settings(max_examples=15)
@given(layouts())
def test_reduced_gradients_equal_the_sum_of_all_parts_on_every_layout(layout):
    assert max(reduced(layout)) < 1e-12


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_expert_gradients_do_not_grow_with_ep(ep):
    assert max(reduced(Layout(dp=4, ep=ep))) < 1e-12


@pytest.mark.parametrize("factor", ["ep", "1/edp", "1/dp"])
def test_the_oracle_refuses_averaged_expert_gradients(factor):
    layout = Layout(dp=4, ep=2)
    want = global_gradients(Topology(layout))
    scale = {"ep": 2.0, "1/edp": 1 / 2, "1/dp": 1 / 4}[factor]

    def program(world):
        groups, model = build(world, layout)
        buffer = GradientBuffer(model.parameters(), groups)
        backward(model, groups)
        buffer.reduce()
        for group in buffer.flat:
            if group.name.startswith("expert"):
                group.data.mul_(scale)
        return worst_error(buffer, want)

    assert min(simulate(4, program)) > 0.1


@UNCHECKED
@settings(max_examples=15)
@given(layouts(), st.integers(1, 3000), st.randoms(use_true_random=False))
def test_buckets_and_the_order_of_readiness_change_nothing(layout, bucket_bytes, random):
    want = global_gradients(Topology(layout))
    seeds = [random.random() for _ in range(Topology(layout).world_size)]

    def program(world):
        groups, model = build(world, layout)
        buffer = GradientBuffer(model.parameters(), groups, bucket_bytes=bucket_bytes)
        backward(model, groups)
        # Every rank calls ready in an order of its own, and for some of the buckets only.
        order = torch.randperm(
            len(buffer.buckets), generator=torch.Generator().manual_seed(int(seeds[world.rank] * 1e9))
        )
        for bucket in order.tolist()[: int(seeds[world.rank] * (len(order) + 1))]:
            buffer.ready(bucket)
        buffer.reduce()
        sizes = [bucket.data.nbytes for bucket in buffer.buckets if len(bucket.segments) > 1]
        return worst_error(buffer, want), max(sizes, default=0)

    for error, largest in simulate(Topology(layout).world_size, program):
        assert error < 1e-12
        assert largest <= bucket_bytes


def test_ranks_make_the_same_calls_whichever_experts_were_touched():
    layout = Layout(dp=4, ep=2, pp=2)

    def run(touched):
        def program(world):
            groups, model = build(world, layout)
            buffer = GradientBuffer(model.parameters(), groups)
            # Each rank misses other tensors; rank 1 misses all of them.
            missed = frozenset(
                n for i, n in enumerate(model.by_name()) if i % 8 == world.rank or world.rank == 1
            )
            backward(model, groups, skip=frozenset() if touched else missed)
            buffer.reduce()

        _, trace = simulate(8, program, trace=True)
        return [[(record.kind, record.group, record.shape) for record in of_rank] for of_rank in trace]

    assert run(touched=True) == run(touched=False)


def alone(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[ProcessGroups, list[nn.Parameter]]:
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    parameters = []
    for number, shape in enumerate(shapes):
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        attach(parameter, dense_spec(f"w{number}", shape, Init.constant(1.0)))
        parameters.append(parameter)
    return groups, parameters


def test_parameters_without_gradient_have_a_zero_main_grad():
    groups, (used, unused) = alone((3,), (2, 2))
    buffer = GradientBuffer([used, unused], groups)
    (used * 2).sum().backward()
    buffer.reduce()
    assert used.main_grad.tolist() == [2.0, 2.0, 2.0]
    assert torch.equal(unused.main_grad, torch.zeros(2, 2))


def test_a_gradient_that_a_backward_wrote_itself_is_not_added_again():
    groups, (weight,) = alone((3,))
    buffer = GradientBuffer([weight], groups)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            weight.main_grad += 5.0
            weight.grad_added_to_main_grad = True
            return torch.full((3,), float("nan"))  # an uninitialised placeholder

    Fused.apply(weight).backward()
    (weight * 2).sum().backward()  # an ordinary micro-batch after it still counts
    buffer.reduce()
    assert weight.main_grad.tolist() == [7.0, 7.0, 7.0]
    assert weight.grad is None


def test_bf16_gradients_accumulate_in_fp32():
    groups, (weight,) = alone((1,), dtype=torch.bfloat16)
    buffer = GradientBuffer([weight], groups)
    for value in [256.0] + [0.5] * 64:
        (weight * value).sum().backward()
    buffer.reduce()
    assert weight.main_grad.dtype == torch.float32
    assert weight.main_grad.item() == 288.0  # in bf16, 256 + 0.5 is 256


def test_fp64_parameters_accumulate_in_fp64():
    groups, (weight,) = alone((1,), dtype=torch.float64)
    GradientBuffer([weight], groups)
    assert weight.main_grad.dtype == torch.float64


def test_reducing_twice_is_refused():
    groups, (weight,) = alone((1,))
    buffer = GradientBuffer([weight], groups)
    buffer.reduce()
    with pytest.raises(UsageError, match="reduce"):
        buffer.reduce()
    buffer.zero()
    buffer.reduce()


def test_a_backward_after_the_reduction_is_refused():
    groups, (weight,) = alone((1,))
    buffer = GradientBuffer([weight], groups)
    buffer.ready(0)
    with pytest.raises(UsageError, match="w0"):
        weight.sum().backward()


def test_readiness_is_announced_once():
    groups, (weight,) = alone((1,))
    buffer = GradientBuffer([weight], groups)
    buffer.ready(0)
    with pytest.raises(UsageError, match="twice"):
        buffer.ready(0)
    with pytest.raises(UsageError, match="no bucket 1"):
        buffer.ready(1)


def test_the_gradients_of_a_stack_are_one_view_of_the_buffer():
    def program(world):
        groups, model = build(world, Layout(dp=2, ep=2))
        buffer = GradientBuffer(model.parameters(), groups)
        for kind, members in model.stacked.items():
            stack = buffer.stack_view(members)
            assert stack.shape == model.stacks[kind].shape
            stack.copy_(torch.arange(stack.numel(), dtype=stack.dtype).view_as(stack))
            for number, parameter in enumerate(members):
                assert torch.equal(parameter.main_grad, stack[number])
        return len(model.stacked)

    assert simulate(2, program) == [4, 4]


def test_a_stack_in_another_order_is_refused():
    groups, (first, second) = alone((2,), (2,))
    buffer = GradientBuffer([first, second], groups)
    with pytest.raises(ValueError, match="contiguous stack"):
        buffer.stack_view([second, first])


def test_frozen_parameters_are_left_out():
    groups, (frozen, free) = alone((2,), (2,))
    frozen.requires_grad_(False)
    buffer = GradientBuffer([frozen, free], groups)
    assert [segment.spec.name for segment in buffer.segments] == ["w1"]


def test_a_parameter_has_one_buffer_at_a_time():
    groups, (weight,) = alone((2,))
    first = GradientBuffer([weight], groups)
    with pytest.raises(UsageError, match="another gradient buffer"):
        GradientBuffer([weight], groups)
    first.close()
    buffer = GradientBuffer([weight], groups)
    weight.sum().backward()
    buffer.reduce()
    assert weight.main_grad.tolist() == [1.0, 1.0]


def test_ranks_with_different_parameters_are_told_where_they_differ():
    layout = Layout(dp=2)

    def program(world):
        groups = ProcessGroups(Topology(layout), world)
        names = ["a", "b", "c"] if world.rank == 0 else ["a", "c", "b"]
        parameters = []
        for name in names:
            parameter = nn.Parameter(torch.zeros(2))
            attach(parameter, dense_spec(name, (2,), Init.constant(0.0)))
            parameters.append(parameter)
        GradientBuffer(parameters, groups)

    with pytest.raises(CommunicationError, match="differ from b on"):
        simulate(2, program)


@pytest.mark.parametrize("bucket_bytes", [0, -4])
def test_a_bucket_size_below_one_is_refused(bucket_bytes):
    groups, parameters = alone((2,))
    with pytest.raises(ConfigError, match=f"bucket_bytes={bucket_bytes}"):
        GradientBuffer(parameters, groups, bucket_bytes=bucket_bytes)


def test_two_parameters_of_one_name_are_refused():
    groups, (first,) = alone((2,))
    second = nn.Parameter(torch.zeros(2))
    attach(second, dense_spec("w0", (2,), Init.constant(0.0)))
    with pytest.raises(ValueError, match="w0"):
        GradientBuffer([first, second], groups)


def test_a_parameter_that_was_frozen_too_late_is_refused_and_not_updated_all_the_same():
    groups, parameters = alone((3,), (2,))
    buffer = GradientBuffer(parameters, groups)
    buffer.zero()
    parameters[1].requires_grad_(False)
    with pytest.raises(UsageError, match="requires_grad=False for 1 of them"):
        buffer.zero()
    buffer.close()
    assert len(GradientBuffer(parameters, groups).segments) == 1
