"""The first gradient of a step overwrites what was left of the step before, and nothing of that survives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isozyme.core.errors import UsageError
from isozyme.core.topology import Topology
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, global_norm
from isozyme.parallel.main_grad import claim, written_wide
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import backward, build, global_gradients, layouts
from tests.parallel.test_grad_buffer import alone, worst_error


def stale_buffer(*shapes: tuple[int, ...], **options: Any) -> tuple[GradientBuffer, list[nn.Parameter]]:
    """A buffer after one step with a gradient for every parameter, whose numbers have become NaN since."""
    groups, parameters = alone(*shapes)
    buffer = GradientBuffer(parameters, groups, **options)
    buffer.zero()
    sum((parameter * 3).sum() for parameter in parameters).backward()
    buffer.reduce()
    for group in buffer.flat:
        group.data.fill_(float("nan"))  # also between parameters
    buffer.zero()
    return buffer, parameters


def test_nothing_of_the_step_before_survives_in_a_parameter_without_gradient():
    buffer, (used, unused) = stale_buffer((3,), (2, 2))
    (used * 2).sum().backward()
    buffer.reduce()
    assert used.main_grad.tolist() == [2.0, 2.0, 2.0]
    assert torch.equal(unused.main_grad, torch.zeros(2, 2))
    assert bool((buffer.flat[0].data[3:64] == 0).all()), "what lies between parameters takes part in sums"


def test_later_micro_batches_add_to_the_first():
    buffer, (weight,) = stale_buffer((3,))
    for factor in (2.0, 5.0, 0.5):
        (weight * factor).sum().backward()
    buffer.reduce()
    assert weight.main_grad.tolist() == [7.5] * 3


def test_the_first_gradient_is_written_without_a_pass_of_zeros():
    _, (weight, _) = stale_buffer((3,), (2,))
    assert bool(weight.main_grad.isnan().all()), "zero() marks, and does not write"
    (weight * 2).sum().backward()
    assert weight.main_grad.tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "reader",
    [
        lambda buffer, weights: buffer.stack_view(weights),
        lambda buffer, weights: torch.cat([tensor for tensor, _ in buffer.counted()]),
        lambda buffer, weights: torch.tensor([len(buffer.non_finite())]),
        lambda buffer, weights: buffer.settle() or torch.stack([w.main_grad for w in weights]),
    ],
)
def test_whoever_reads_before_the_reduction_reads_zeros(reader):
    buffer, weights = stale_buffer((64,), (64,))
    assert bool((reader(buffer, weights) == 0).all())
    (weights[0] * 2).sum().backward()  # and what comes later is added
    buffer.reduce()
    assert weights[0].main_grad.tolist() == [2.0] * 64


def test_a_backward_that_adds_by_itself_finds_zeros_in_every_step():
    groups, (weight,) = alone((3,))
    buffer = GradientBuffer([weight], groups)
    for _ in range(3):
        buffer.zero()
        weight.main_grad += 5.0
        buffer.reduce()
        assert weight.main_grad.tolist() == [5.0] * 3


def test_adding_to_stale_numbers_is_refused():
    _, (weight,) = stale_buffer((3,))

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.sum()

        @staticmethod
        def backward(ctx, grad):
            weight.main_grad += 5.0
            weight.grad_added_to_main_grad = True
            return torch.zeros(3)

    with pytest.raises(UsageError, match="claim"):
        Fused.apply(weight).backward()


@pytest.mark.parametrize("touched", ["none", "one", "all"])
def test_a_stack_of_experts_is_overwritten_once_whoever_was_there_before(touched):
    buffer, weights = stale_buffer((8, 8), (8, 8))
    for weight in weights[: {"none": 0, "one": 1, "all": 2}[touched]]:
        (weight * 2).sum().backward()
    main = buffer.flat[0].data.view(2, 8, 8)
    for _ in range(2):
        if claim(weights):
            main.fill_(1.0)
        else:
            main.add_(1.0)
    buffer.reduce()
    before = {"none": [0.0, 0.0], "one": [2.0, 0.0], "all": [2.0, 2.0]}[touched]
    assert [float(w.main_grad[0, 0]) for w in weights] == [2.0 + value for value in before]


@settings(max_examples=6)
@given(layouts(), st.booleans())
def test_a_second_step_reduces_its_own_gradients_alone_on_every_layout(layout, sharded):
    want = global_gradients(Topology(layout), step=1)

    def program(world):
        groups, model = build(world, layout)
        buffer = GradientBuffer(model.parameters(), groups, sharded=sharded)
        for step in range(2):
            buffer.zero()
            # In the first step, each rank misses other tensors, so that some are stale and some are not.
            names = frozenset(n for i, n in enumerate(model.by_name()) if i % 3 == world.rank % 3)
            backward(model, groups, step, skip=frozenset() if step else names)
            buffer.reduce()
        buffer.gather()
        return worst_error(buffer, want)

    assert max(simulate(Topology(layout).world_size, program)) < 1e-12


def test_a_weight_that_is_used_twice_in_one_backward_gets_both_gradients():
    buffer, (weight,) = stale_buffer((3,))
    ((weight * 2).sum() + (weight * 5).sum()).backward()
    buffer.reduce()
    assert weight.main_grad.tolist() == [7.0] * 3


def as_computed(**options: Any) -> tuple[GradientBuffer, nn.Parameter]:
    groups, (weight,) = alone((3,))
    weight.data = weight.data.bfloat16()
    return GradientBuffer([weight], groups, as_computed=True, **options), weight


def test_a_gradient_that_is_kept_as_computed_takes_one_a_step():
    buffer, weight = as_computed()
    for factor in (2.0, 3.0):
        buffer.zero()
        (weight * factor).sum().backward()
        assert weight.main_grad.dtype == torch.bfloat16
        with pytest.raises(UsageError, match="nothing is added to a gradient that is kept as computed"):
            (weight * 5).sum().backward()
        buffer.reduce()
        assert weight.main_grad.tolist() == [factor] * 3
        assert global_norm(buffer) == pytest.approx(factor * 3**0.5, rel=1e-12)
    assert clip_(buffer, 1.0, 2.0) == 1.0
    with pytest.raises(UsageError, match=r"would be rounded: dense tp.cp.dp bfloat16, times 0\.5"):
        clip_(buffer, 2.0, 1.0)


def test_a_step_without_a_gradient_and_one_with_follow_each_other_in_the_parameters_type():
    buffer, weight = as_computed()
    for factor in (0.0, 4.0, 0.0, 0.0, 2.0):
        buffer.zero()
        if factor:
            (weight * factor).sum().backward()
        buffer.reduce()
        assert weight.main_grad.tolist() == [factor] * 3


def test_a_backward_that_computes_in_fp32_keeps_it_and_one_that_did_not_say_so_is_refused():
    groups, (weight,) = alone((3,))
    weight.data = weight.data.bfloat16()
    written_wide([weight])
    assert [group.narrow for group in GradientBuffer([weight], groups, as_computed=True).flat] == [False]
    buffer, weight = as_computed()
    with pytest.raises(UsageError, match="was chosen after the gradient buffer was made"):
        written_wide([weight])
    weight.grad_added_to_main_grad = True
    with pytest.raises(UsageError, match=r"added to .* by itself, which is bfloat16"):
        (weight * 2).sum().backward()
    buffer.close()
