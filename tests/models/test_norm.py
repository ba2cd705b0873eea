"""RMS norm against the formula written out."""

from __future__ import annotations

import torch

from isozyme.models.norm import RMSNorm, rms_norm
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
