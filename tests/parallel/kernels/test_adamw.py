"""The one-pass AdamW against its twin, and the twin against torch's AdamW."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isozyme.parallel.kernels.adamw import Coefficients, Update, adamw_twin, unmet
from isozyme.parallel.kernels.triton_adamw import AdamWLaunches, Tuning

SIZES = [(5000, 0.1), (1, 0.0), (0, 0.1), (4096, 0.0), (77, 0.1)]


def draw(
    copies: torch.dtype | None, device: str, *, offset: int = 0, grad: torch.dtype = torch.float32
) -> list[Update]:
    """Parameters of several sizes, which view flat buffers from an offset on; the last two hold `grad`."""
    generator = torch.Generator().manual_seed(3)
    total = sum(size for size, _ in SIZES) + offset

    def flat(scale: float) -> Tensor:
        return (torch.randn(total, generator=generator) * scale).to(device)

    masters, grads, firsts, seconds = flat(1.0), flat(3.0), flat(0.1), flat(0.1).square()
    found, at = [], offset
    for number, (size, decay) in enumerate(SIZES):
        part = slice(at, at + size)
        at += size
        copied = copies is not None and number != 3
        found.append(
            Update(
                master=masters[part],
                grad=grads[part].to(grad if number > 2 else torch.float32),
                exp_avg=firsts[part],
                exp_avg_sq=seconds[part],
                copy=torch.empty(size, dtype=copies, device=device) if copied else None,
                weight_decay=decay,
            )
        )
    return found


def numbers(step: int, scale: float = 0.3) -> Coefficients:
    return Coefficients(lr=0.02, beta1=0.9, beta2=0.95, eps=1e-8, scale=scale, step=step)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("copies", [None, torch.bfloat16, torch.float16])
def test_kernel_equals_twin(copies: torch.dtype | None, offset: int, device: str) -> None:
    ours, theirs = draw(copies, device, offset=offset), draw(copies, device, offset=offset)
    launches = AdamWLaunches(ours)
    for step in (1, 2):
        launches(numbers(step))
        adamw_twin(theirs, numbers(step))
    for one, other in zip(ours, theirs, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=2e-6, atol=1e-6)
        assert torch.equal(one.grad, other.grad)
        if one.copy is not None and other.copy is not None:
            truncates = device == "cpu" and copies == torch.bfloat16  # Triton's interpreter does
            rounded = one.master.to(one.copy.dtype)
            torch.testing.assert_close(one.copy, rounded, rtol=2**-7 if truncates else 0, atol=0)


@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tuning", [Tuning(block=256, num_warps=1, eviction=""), Tuning(block=1024)])
def test_no_number_depends_on_tuning_or_on_the_type_that_holds_a_gradient(
    tuning: Tuning, grad: torch.dtype, device: str
) -> None:
    updates, wide = draw(torch.float16, device, grad=grad), draw(torch.float16, device, grad=grad)
    wide = [replace(each, grad=each.grad.float()) for each in wide]
    AdamWLaunches(updates, tuning)(numbers(1))
    AdamWLaunches(wide)(numbers(1))
    for one, other in zip(updates, wide, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq", "copy"):
            found, expected = getattr(one, name), getattr(other, name)
            assert found is expected is None or torch.equal(found, expected)


def test_twin_is_torch_adamw_on_scaled_gradients(device: str) -> None:
    updates = draw(None, device)
    for each in updates:
        each.exp_avg.zero_()
        each.exp_avg_sq.zero_()
    parameters = [each.master.clone() for each in updates]
    groups = [
        {"params": [parameter], "weight_decay": each.weight_decay}
        for parameter, each in zip(parameters, updates, strict=True)
    ]
    reference = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for step in (1, 2, 3):
        adamw_twin(updates, numbers(step))
        for parameter, each in zip(parameters, updates, strict=True):
            parameter.grad = each.grad * 0.3
        reference.step()
    for parameter, each in zip(parameters, updates, strict=True):
        torch.testing.assert_close(each.master, parameter, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_updated_is_said(device: str) -> None:
    updates = draw(torch.bfloat16, device)
    assert unmet(updates) is None
    wide = Update(
        master=torch.zeros(4, dtype=torch.float64),
        grad=torch.zeros(4),
        exp_avg=torch.zeros(4),
        exp_avg_sq=torch.zeros(4),
        copy=None,
        weight_decay=0.0,
    )
    assert "float64" in (unmet([wide]) or "")
    halved = [replace(each, grad=each.grad.double()) for each in updates]
    assert "reads gradients of float32, bfloat16 and float16 only: float64" in (unmet(halved) or "")
