"""Kernels that write parameters themselves, with a stand-in for Transformer Engine's `FusedAdam`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from isozyme.core.accelerators import Probe
from isozyme.core.config import OptimConfig
from isozyme.core.errors import UsageError
from isozyme.core.initialisation import Init
from isozyme.core.topology import Layout, Topology
from isozyme.parallel import optimizer_backends
from isozyme.parallel.checkpoint import load_checkpoint, save_checkpoint
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import attach, dense_spec
from isozyme.parallel.sharded_optimizer import ShardedOptimizer, make_optimizer
from isozyme.parallel.simulated import simulate
from tests.parallel.sharded_model import backward, build

CONFIG = OptimConfig(lr=0.1, weight_decay=0.3)


class FusedAdam(torch.optim.Optimizer):
    """The interface of Transformer Engine 2.20's, as far as masters are concerned, on a CPU."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), step = group["betas"], group["step"]
            for p in group["params"]:
                state, grad = self.state[p], p.decoupled_grad if self.use_decoupled_grad else p.grad
                low = p.dtype in (torch.bfloat16, torch.float16)
                master = state["master_param"] if low and self.master_weights else p
                assert {t.dtype for t in (master, grad, state["exp_avg"], state["exp_avg_sq"])} == {
                    torch.float32
                }
                assert ("master_param" in state) == (low and self.master_weights)
                master.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                master.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**step))
                if master is not p:
                    p.copy_(master)


class OldFusedAdam(FusedAdam):
    """One that knows no masters."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)


@pytest.fixture(params=[FusedAdam, OldFusedAdam])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[FusedAdam]:
    monkeypatch.setattr(optimizer_backends, "te_fused_adam", lambda: Probe(request.param, None))
    monkeypatch.setattr(optimizer_backends, "_fused", lambda probe, slots: probe.why_not)  # also on a CPU
    return request.param


def steps(world, layout: Layout, implementation: str, *, sharded: bool, dtype=torch.bfloat16):
    groups, model = build(world, layout, dtype)
    buffer = GradientBuffer(model.parameters(), groups, sharded=sharded)
    config = OptimConfig(lr=0.1, weight_decay=0.3, implementation=implementation)  # type: ignore[arg-type]
    optimizer = make_optimizer(buffer, config)
    for step in range(3):
        buffer.zero()
        backward(model, groups, step)
        buffer.reduce()
        optimizer.step(0.1 / (step + 1))
    return groups, model, optimizer


@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_and_state_are_those_of_the_torch_kernel(fused, sharded):
    def program(world):
        found, want = (
            steps(world, Layout(dp=2, ep=2), name, sharded=sharded)[1:] for name in ("te", "torch")
        )
        assert found[1]._backend.writes_copies == (fused is FusedAdam)
        for (name, one, _), (_, other, _) in zip(found[1].state(), want[1].state(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
        for one, other in zip(found[0].parameters(), want[0].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-9)

    simulate(2, program)


@pytest.mark.parametrize("kind", [Optimizer, ShardedOptimizer])
def test_parameters_are_their_rounded_masters_in_the_same_memory(fused, kind):
    _, model, optimizer = steps(SingleWorld(), Layout(), "te", sharded=kind is ShardedOptimizer)
    assert type(optimizer) is kind
    masters = {name: tensor for name, tensor, _ in optimizer.state() if name.startswith("optim.master.")}
    assert len(masters) == len(model.by_name())
    for name, parameter in model.by_name().items():
        assert torch.equal(parameter.detach(), masters[f"optim.master.{name}"].bfloat16())
    if fused is FusedAdam:  # bound to the parameters and to the optimiser's own masters: no second copy
        held = {p.data_ptr() for group in optimizer._backend._inner.param_groups for p in group["params"]}
        assert held == {parameter.data_ptr() for parameter in model.parameters()}
        inner = {state["master_param"].data_ptr() for state in optimizer._backend._inner.state.values()}
        assert inner == {master.data_ptr() for master in masters.values()}


def test_a_parameter_that_is_its_own_master_goes_along(fused):
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    weights = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for number, weight in enumerate(weights):
        attach(weight, dense_spec(f"w{number}", (4,), Init.constant(1.0), decay=bool(number)))
    buffer = GradientBuffer(weights, groups)
    optimizer = Optimizer(buffer, CONFIG)
    assert optimizer.choice.name == "te"
    (weights[0].float().sum() + weights[1].sum()).backward()
    buffer.reduce()
    optimizer.step(0.1)
    assert weights[1].tolist() == [pytest.approx(1 - 0.1 * 0.3 - 0.1, rel=1e-5)] * 4
    assert torch.equal(weights[0].detach(), torch.full((4,), 0.9).bfloat16())


def test_a_checkpoint_goes_over_to_another_kernel_and_back(fused, tmp_path):
    groups, model, optimizer = steps(SingleWorld(), Layout(), "te", sharded=True)
    path = save_checkpoint(tmp_path, 3, list(optimizer.state()), groups)
    want = {name: parameter.detach().clone() for name, parameter in model.by_name().items()}
    for implementation, sharded in (("torch", False), ("te", True), ("te", False)):
        _, other, state = steps(SingleWorld(), Layout(), implementation, sharded=sharded)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(-1.0)
        load_checkpoint(path, list(state.state()), groups)
        state.loaded(3)  # brings the masters into the parameters, which were not loaded
        assert all(torch.equal(parameter, want[name]) for name, parameter in other.by_name().items())


def test_the_choice_says_what_the_kernel_writes(fused):
    _, _, optimizer = steps(SingleWorld(), Layout(), "te", sharded=False)
    what = "masters and writes bfloat16 parameters" if fused is FusedAdam else "updates masters"
    assert what in optimizer.choice.why
    _, _, wide = steps(SingleWorld(), Layout(), "te", sharded=False, dtype=torch.float32)
    assert not wide._backend.writes_copies


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_were_cast_since_are_refused_and_not_left_behind(sharded, dtype):
    def program(world):
        groups, model = build(world, Layout(dp=2), dtype)
        buffer = GradientBuffer(model.parameters(), groups, sharded=sharded)
        optimizer = make_optimizer(buffer, OptimConfig(lr=0.1))
        model.double()
        buffer.zero()
        buffer.reduce()
        with pytest.raises(UsageError, match="were moved or cast since"):
            optimizer.step(0.1)
        with pytest.raises(UsageError, match="Move and cast the model first"):
            optimizer.refresh_masters()

    simulate(2, program)
