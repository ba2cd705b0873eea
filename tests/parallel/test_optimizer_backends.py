"""Which AdamW runs, and that all of them go on from the same state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isozyme.core.accelerators import Probe
from isozyme.core.config import OptimConfig
from isozyme.core.errors import BackendError
from isozyme.parallel.optimizer_backends import AdamW, Slot, choose


class GroupSteppedAdamW(torch.optim.Optimizer):
    """AdamW written out, which counts steps by group as the fused implementations of TE and apex do."""

    def __init__(self, params, lr, betas, eps):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (b1, b2), n = group["betas"], group["step"]
            for p in group["params"]:
                m, v = self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                update = (m / (1 - b1**n)) / ((v / (1 - b2**n)).sqrt() + group["eps"])
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))


def slots(device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Slot]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for decay in (True, False, True):
        master, grad = (
            torch.randn(5, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(2)
        )
        zeros = torch.zeros_like(master)
        made.append(Slot(master=master, grad=grad, exp_avg=zeros, exp_avg_sq=zeros.clone(), decay=decay))
    return made


def run(build, mine: list[Slot], *, step_in_group: bool, updates: int, start: int = 0) -> None:
    backend = AdamW(build, mine, OptimConfig(weight_decay=0.2), step_in_group=step_in_group)
    backend.set_updates(start)
    for number in range(start, start + updates):
        for place, slot in enumerate(mine):
            slot.grad.copy_(torch.linspace(-1, 1, 5, dtype=slot.grad.dtype) * (number + 1) + place)
        backend.step(0.01 * (number + 1))


def test_implementations_that_count_by_group_and_by_parameter_agree():
    by_group, by_parameter = slots(), slots()
    run(GroupSteppedAdamW, by_group, step_in_group=True, updates=4)
    run(torch.optim.AdamW, by_parameter, step_in_group=False, updates=4)
    for a, b in zip(by_group, by_parameter, strict=True):
        torch.testing.assert_close(a.master, b.master, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(a.exp_avg_sq, b.exp_avg_sq, rtol=1e-12, atol=1e-14)


def test_one_implementation_goes_on_where_another_stopped():
    through, switched = slots(), slots()
    run(torch.optim.AdamW, through, step_in_group=False, updates=4)
    run(GroupSteppedAdamW, switched, step_in_group=True, updates=2)
    run(torch.optim.AdamW, switched, step_in_group=False, updates=2, start=2)
    for a, b in zip(through, switched, strict=True):
        torch.testing.assert_close(a.master, b.master, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("build", "in_group"), [(GroupSteppedAdamW, True), (torch.optim.AdamW, False)])
def test_gradients_of_lower_precision_are_widened_before_they_are_scaled(build, in_group):
    wide = slots(dtype=torch.float32)
    for slot in wide:
        slot.grad.copy_(slot.grad.bfloat16())
    mixed = slots(dtype=torch.float32)
    mixed = [replace(slot, grad=slot.grad.bfloat16()) if slot.decay else slot for slot in mixed]
    mixed[1].grad.copy_(wide[1].grad)
    before = mixed[0].grad.clone()
    for given in (wide, mixed):
        backend = AdamW(build, given, OptimConfig(weight_decay=0.2), step_in_group=in_group)
        backend.set_updates(0)
        backend.step(0.01, scale=0.3)
    assert torch.equal(mixed[0].grad, before)
    for one, other in zip(mixed, wide, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_a_rank_without_parameters_steps_along():
    backend, choice = choose([], OptimConfig())
    backend.set_updates(3)
    backend.step(0.1)
    assert choice.name


def test_a_fused_kernel_is_refused_where_it_does_not_apply():
    probes = {"te": lambda: Probe(GroupSteppedAdamW, None), "apex": lambda: Probe(None, "no apex here")}
    _, choice = choose(slots(), OptimConfig(), probes)
    assert choice.name == "torch"
    assert "float64 on cpu" in choice.why
    assert "no apex here" in choice.why
    assert "not triton: its kernel runs on CUDA" in choice.why
    with pytest.raises(BackendError, match="not triton"):
        choose(slots(), OptimConfig(implementation="triton"), probes)
    with pytest.raises(BackendError, match="float64 on cpu"):
        choose(slots(), OptimConfig(implementation="te"), probes)


@pytest.mark.parametrize(("te", "chosen"), [(None, "te"), ("te is broken", "apex")])
def test_auto_takes_the_first_that_is_usable(te, chosen):
    probes = {
        "te": lambda: Probe(GroupSteppedAdamW if te is None else None, te),
        "apex": lambda: Probe(GroupSteppedAdamW, None),
    }
    _, choice = choose([], OptimConfig(), probes)
    assert choice.name == chosen
    assert te is None or te in choice.why


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "te", "apex", "torch"])
def test_every_implementation_equals_the_written_out_one_on_a_gpu(implementation):
    fused = slots("cuda", torch.float32)
    config = OptimConfig(weight_decay=0.2, implementation=implementation)
    try:
        backend, _ = choose(fused, config)
    except BackendError as error:
        pytest.skip(str(error))
    plain = slots("cuda", torch.float32)
    for number in range(4):
        for slot in fused:
            slot.grad.fill_(number + 0.5)
        backend.step(0.01)
    twin = AdamW(GroupSteppedAdamW, plain, config, step_in_group=True)
    for number in range(4):
        for slot in plain:
            slot.grad.fill_(number + 0.5)
        twin.step(0.01)
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a.master, b.master, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a.exp_avg, b.exp_avg, rtol=1e-5, atol=1e-6)
