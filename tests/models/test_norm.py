"""RMS norm against the formula written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isozyme.core.accelerators import Probe
from isozyme.core.config import NormImplementation
from isozyme.core.errors import BackendError
from isozyme.models.norm import RMSNorm, choose_norm, rms_norm
from isozyme.parallel.shard_spec import spec_of
from tests.models.common import builder


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def test_norm_equals_its_formula_in_value_and_gradient() -> None:
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 5, 16, dtype=torch.float64)
    ours, theirs = rms_norm(x, weight, 1e-5), _reference(x, weight, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours, (x, weight), upstream),
        torch.autograd.grad(theirs, (x, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_norm_of_bf16_rounds_once_at_the_end() -> None:
    x = (torch.randn(64, 256) * 30).bfloat16()
    weight = torch.randn(256).bfloat16()
    exact = _reference(x.double(), weight.double(), 1e-5)
    error = (rms_norm(x, weight, 1e-5).double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8 * 1.001).all())  # half a unit in the last of 8 bits


def test_norm_survives_squares_that_overflow_half_precision() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5), torch.ones_like(x))


def test_norm_starts_as_ones_without_weight_decay() -> None:
    weight = RMSNorm(builder(), "final_norm", 8, eps=1e-5).weight
    assert weight.tolist() == [1.0] * 8
    assert not spec_of(weight).decay
    assert spec_of(weight).name == "final_norm.weight"


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.full_like(x, 7.0)


MISSING, THERE = (lambda: Probe(None, "it is Tuesday")), (lambda: Probe(_fake, None))
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("te", "apex", "chosen"),
    [(THERE, THERE, "te"), (MISSING, THERE, "apex"), (MISSING, MISSING, "torch")],
)
def test_auto_takes_te_then_apex_then_torch(te, apex, chosen) -> None:
    _, choice = choose_norm("auto", CUDA, torch.bfloat16, {"te": te, "apex": apex})
    assert choice.name == chosen
    assert ("not te: it is Tuesday" in choice.why) == (te is MISSING)


@pytest.mark.parametrize("name", ["te", "apex"])
def test_a_named_norm_runs_or_is_refused_with_the_reason(name: NormImplementation) -> None:
    other = "apex" if name == "te" else "te"
    _, choice = choose_norm(name, CUDA, torch.float32, {other: MISSING, name: THERE})
    assert str(choice) == f"{name} (named by model.norm)"
    with pytest.raises(BackendError, match=f"model.norm={name}.*it is Tuesday"):
        choose_norm(name, CUDA, torch.float32, {other: THERE, name: MISSING})
    with pytest.raises(BackendError, match=f"model.norm={name}.*float64 on cpu"):
        choose_norm(name, torch.device("cpu"), torch.float64, {other: THERE, name: THERE})


def test_auto_asks_nobody_on_a_cpu_or_in_fp64() -> None:
    def asked() -> Probe:
        raise AssertionError

    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float64)):
        _, choice = choose_norm("auto", torch.device(device), dtype, {"te": asked, "apex": asked})
        assert choice.name == "torch"
        assert device in choice.why


def test_a_fused_norm_leaves_a_model_that_was_cast_to_fp64_to_torch() -> None:
    norm, _ = choose_norm("te", CUDA, torch.float32, {"te": THERE})
    x, weight = torch.randn(3, 8), torch.rand(8)
    assert (norm(x, weight, 1e-5) == 7.0).all()
    torch.testing.assert_close(
        norm(x.double(), weight.double(), 1e-5), _reference(x.double(), weight.double(), 1e-5)
    )
