"""The bf16 router's product against the same in fp64, in values and both gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from isozyme.moe.router_logits import bf16_logits, bf16_parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draw(count: int, experts: int, hidden: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weight and which tokens are real: padding is NaN."""
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randn(count, hidden, generator=generator)
    weight = torch.randn(experts, hidden, generator=generator) / hidden**0.5
    valid = torch.rand(count, generator=generator) < 0.7
    tokens[~valid] = math.nan
    low = (each.bfloat16().to(device).requires_grad_() for each in (tokens, weight))
    return *low, valid.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "experts", "hidden"), [(300, 16, 512), (7, 5, 24), (1, 1, 8), (0, 4, 8)])
def test_values_are_those_of_fp32_and_gradients_are_rounded_once(
    count: int, experts: int, hidden: int, device: str
) -> None:
    tokens, weight, valid = draw(count, experts, hidden, device)
    upstream = torch.randn(count, experts, generator=torch.Generator().manual_seed(1)).to(device)
    logits = bf16_logits(tokens, weight, valid)
    found = torch.autograd.grad(logits, (tokens, weight), upstream)
    wide = [each.detach().double().requires_grad_() for each in (tokens, weight)]
    want = torch.where(valid[:, None], wide[0], 0.0) @ wide[1].T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), want, rtol=1e-5, atol=1e-5)
    for got, expected in zip(found, torch.autograd.grad(want, wide, upstream.double()), strict=True):
        assert got.dtype == torch.bfloat16
        # Rounding to bf16 moves a number by 2^-8 of it at most; rounding the upstream gradient adds to that.
        torch.testing.assert_close(got.double(), expected, rtol=2**-8 * 1.01, atol=1e-5)


def test_three_parts_sum_exactly_to_the_number() -> None:
    x = torch.randn(50, 9) * 10.0 ** torch.randint(-20, 20, (50, 9))
    parts = bf16_parts(x)
    assert torch.equal(parts.double().sum(dim=1), x.double())
    assert not torch.equal(parts[:, :2].double().sum(dim=1), x.double())


def test_only_the_operands_are_kept_for_backward() -> None:
    tokens, weight, valid = draw(20, 4, 16, "cpu")
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        bf16_logits(tokens, weight, valid)
    assert set(kept) == {each.untyped_storage().data_ptr() for each in (tokens, weight, valid)}
