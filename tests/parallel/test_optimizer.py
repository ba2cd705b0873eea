"""The sharded optimiser makes the update that one rank with the whole model would make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import BackendError, UsageError
from isozyme.core.initialisation import Init, initial_shard
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.parameters import create_parameter
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import ShardSpec, attach, dense_spec
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import (
    PARTIAL,
    UNCHECKED,
    backward,
    build,
    global_gradients,
    global_specs,
    layouts,
    random_tensor,
)

CONFIG = OptimConfig(lr=0.1, weight_decay=0.3, implementation="torch")
RATES = (0.1, 0.05, 0.2)


def reference(layout: Layout) -> dict[str, torch.Tensor]:
    """torch's own AdamW on whole tensors, from gradients that the oracle adds up."""
    topology = Topology(layout)
    weights = {}
    for spec, _, _ in global_specs(topology.size("pp"), topology.size("tp")):
        whole = tuple(slice(0, size) for size in spec.global_shape)
        value = initial_shard(
            name=spec.name, global_shape=spec.global_shape, slices=whole, init=spec.init, seed=0
        )
        weights[spec.name] = (nn.Parameter(value.double()), spec.decay)
    inner = torch.optim.AdamW(
        [
            {"params": [w for w, decay in weights.values() if decay], "weight_decay": CONFIG.weight_decay},
            {"params": [w for w, decay in weights.values() if not decay], "weight_decay": 0.0},
        ],
        lr=CONFIG.lr,
        betas=CONFIG.betas,
        eps=CONFIG.eps,
        foreach=False,
    )
    for step, rate in enumerate(RATES):
        for name, gradient in global_gradients(topology, step).items():
            weights[name][0].grad = gradient
        for group in inner.param_groups:
            group["lr"] = rate
        inner.step()
    return {name: weight.detach() for name, (weight, _) in weights.items()}


def trained(world, layout):
    groups, model = build(world, layout)
    buffer = GradientBuffer(model.parameters(), groups)
    optimizer = Optimizer(buffer, CONFIG)
    for step, rate in enumerate(RATES):
        buffer.zero()
        backward(model, groups, step)
        buffer.reduce()
        optimizer.step(rate)
    return groups, model, optimizer


@UNCHECKED
@settings(max_examples=12)
@given(layouts())
def test_three_steps_equal_adamw_on_the_gathered_model(layout):
    want = reference(layout)

    def program(world):
        groups, model, _ = trained(world, layout)
        for name, parameter in model.by_name().items():
            local = want[name][parameter.shard_spec.slices(groups.topology, world.rank)]
            torch.testing.assert_close(parameter.detach(), local, rtol=1e-12, atol=1e-12)

    simulate(Topology(layout).world_size, program)


def drifts(replicas, *, steps: int = 4) -> bool:
    """Whether the replicas of a norm on tp=2, dp=2 differ after some steps with distinct data."""
    layout = Layout(tp=2, dp=2)

    def program(world):
        groups = ProcessGroups(Topology(layout), world)
        spec = ShardSpec(name="w", global_shape=(17,), replicas=replicas, init=Init.normal(1.0))
        weight = create_parameter(spec, groups, seed=0)
        buffer = GradientBuffer([weight], groups)
        optimizer = Optimizer(buffer, CONFIG)
        for step in range(steps):
            buffer.zero()
            tokens = random_tensor("tokens", (17,), step, world.rank).float()
            (weight.square() * tokens).sum().backward()
            buffer.reduce()
            optimizer.step(0.1)
        return weight.detach()

    first, *others = simulate(4, program)
    return any(not torch.equal(first, other) for other in others)


def test_replicas_stay_bitwise_equal_with_distinct_data():
    assert not drifts(PARTIAL)


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_a_missing_sum_over_an_axis_is_seen_as_drift(axis):
    assert drifts({**PARTIAL, axis: "identical"})


def single(dtype: torch.dtype, config: OptimConfig = CONFIG, *, decay: bool = True):
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    attach(weight, dense_spec("w", (4,), Init.constant(1.0), decay=decay))
    buffer = GradientBuffer([weight], groups)
    return weight, buffer, Optimizer(buffer, config)


def test_bf16_parameters_are_rounded_from_fp32_masters_that_keep_small_updates():
    config = OptimConfig(weight_decay=0.0, implementation="torch")
    weight, buffer, optimizer = single(torch.bfloat16, config)
    for _ in range(20):
        buffer.zero()
        weight.sum().backward()
        buffer.reduce()
        optimizer.step(1e-4)  # a bf16 weight of 1 cannot show a step of 1e-4
    state = {name: tensor for name, tensor, _ in optimizer.state()}
    master = state["optim.master.w"]
    assert master.dtype == torch.float32
    torch.testing.assert_close(master, torch.full((4,), 1 - 20e-4), rtol=1e-5, atol=0)
    assert torch.equal(weight.detach(), master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_parameters_are_their_own_masters(dtype):
    _, _, optimizer = single(dtype)
    assert [name for name, _, _ in optimizer.state()] == ["optim.exp_avg.w", "optim.exp_avg_sq.w"]
    assert {tensor.dtype for _, tensor, _ in optimizer.state()} == {dtype}


@pytest.mark.parametrize(("decay", "value"), [(True, 1 - 0.1 * 0.3), (False, 1.0)])
def test_weight_decay_applies_where_the_spec_says_so(decay, value):
    weight, buffer, optimizer = single(torch.float64, decay=decay)
    buffer.reduce()  # no gradient: decay alone
    optimizer.step(0.1)
    assert weight.tolist() == [pytest.approx(value, rel=1e-15)] * 4


def test_a_step_before_the_reduction_is_refused():
    _, _, optimizer = single(torch.float32)
    with pytest.raises(UsageError, match="reduce"):
        optimizer.step(0.1)


def test_new_weights_reach_the_masters():
    weight, buffer, optimizer = single(torch.bfloat16)
    with torch.no_grad():
        weight.fill_(7.0)
    optimizer.refresh_masters()
    buffer.reduce()
    optimizer.step(0.0)
    assert weight.tolist() == [7.0] * 4


def test_optimizer_state_does_not_collect_gradients_on_the_parameters():
    weight, buffer, optimizer = single(torch.float32)
    for _ in range(2):
        buffer.zero()
        weight.sum().backward()
        buffer.reduce()
        optimizer.step(0.1)
    assert weight.grad is None
    assert weight.main_grad.tolist() == [1.0] * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no CUDA device")
@pytest.mark.parametrize("name", ["te", "apex"])
def test_an_implementation_that_was_named_but_cannot_run_is_an_error(name):
    with pytest.raises(BackendError, match=rf"optim.implementation={name}; not {name}: "):
        single(torch.float32, OptimConfig(implementation=name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no CUDA device")
def test_auto_says_what_it_chose_and_why_not_the_others():
    choice = single(torch.float32, OptimConfig())[2].choice
    assert choice.name == "torch"
    assert "not te: " in choice.why
    assert "not apex: " in choice.why
