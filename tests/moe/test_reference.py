"""The slow twins themselves, held to arithmetic by hand and to finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from isozyme.core.config import RouterConfig
from isozyme.moe.reference import reference_moe, reference_routing
from isozyme.moe.types import Routing


def make_routing(ids: list[list[int]], probs: Tensor, kept: list[list[bool]], experts: int) -> Routing:
    return Routing(topk_ids=torch.tensor(ids), topk_probs=probs, kept=torch.tensor(kept), num_experts=experts)


def test_experts_of_width_one_agree_with_arithmetic_by_hand() -> None:
    def silu(x: float) -> float:
        return x / (1 + math.exp(-x))

    gate_up = torch.tensor([[[[2.0]], [[3.0]]], [[[-1.0]], [[5.0]]]], dtype=torch.float64)
    down = torch.tensor([[[7.0]], [[11.0]]], dtype=torch.float64)
    tokens = torch.tensor([[0.5], [-2.0], [4.0]], dtype=torch.float64)
    probs = torch.tensor([[0.25, 0.75], [0.6, 0.4], [0.5, 0.5]], dtype=torch.float64)
    routing = make_routing([[0, 1], [1, 0], [0, 1]], probs, [[True] * 2, [True, False], [False] * 2], 2)
    expected = [
        0.25 * 7 * silu(1.0) * 1.5 + 0.75 * 11 * silu(-0.5) * 2.5,
        0.6 * 11 * silu(2.0) * -10.0,
        0.0,
    ]
    out = reference_moe(tokens, routing, gate_up, down)
    assert out.flatten().tolist() == pytest.approx(expected)


def test_every_gradient_agrees_with_finite_differences() -> None:
    gate_up = torch.randn(3, 2, 2, 4, dtype=torch.float64, requires_grad=True)
    down = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    tokens = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        routing = make_routing([[0, 2], [2, 0], [0, 2]], p, [[True] * 2, [True, False], [False] * 2], 3)
        return reference_moe(x, routing, w1, w2)

    assert torch.autograd.gradcheck(run, (tokens, probs, gate_up, down))
    run(tokens, probs, gate_up, down).sum().backward()
    assert gate_up.grad is not None
    assert not gate_up.grad[1].any()


def test_tokens_without_kept_slots_give_zero_and_poison_nothing() -> None:
    gate_up = torch.randn(2, 2, 3, 4, requires_grad=True)
    down = torch.randn(2, 4, 3, requires_grad=True)
    tokens = torch.randn(2, 4)
    tokens[1] = torch.nan
    routing = make_routing([[0], [1]], torch.tensor([[0.5], [torch.nan]]), [[True], [False]], 2)
    out = reference_moe(tokens, routing, gate_up, down)
    out.sum().backward()
    assert not out[1].any()
    assert gate_up.grad is not None
    assert bool(gate_up.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_type_and_no_tokens_are_taken(dtype: torch.dtype) -> None:
    probs = torch.empty(0, 2, dtype=torch.promote_types(dtype, torch.float32))
    routing = Routing(
        topk_ids=torch.empty(0, 2, dtype=torch.int64),
        topk_probs=probs,
        kept=torch.empty(0, 2, dtype=torch.bool),
        num_experts=3,
    )
    out = reference_moe(
        torch.empty(0, 4, dtype=dtype),
        routing,
        torch.ones(3, 2, 2, 4, dtype=dtype),
        torch.ones(3, 4, 2, dtype=dtype),
    )
    assert out.shape == (0, 4)
    assert out.dtype == dtype


def test_routing_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), math.log(2.0), 0.0]] * 2, dtype=torch.float64)
    config = RouterConfig(num_experts=4, topk=2, scaling_factor=2.0)
    routing = reference_routing(logits, config, token_valid=torch.tensor([True, False]))
    assert routing.topk_ids.tolist() == [[1, 2], [0, 1]]
    assert routing.topk_probs.flatten().tolist() == pytest.approx([2 * 0.6, 2 * 0.4, 0.0, 0.0])
    assert routing.kept.tolist() == [[True, True], [False, False]]


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), math.log(2.0), 0.0]], dtype=torch.float64)
    config = RouterConfig(num_experts=4, topk=1, renormalize=False)
    bias = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    routing = reference_routing(logits, config, expert_bias=bias)
    assert routing.topk_ids.tolist() == [[3]]
    assert routing.topk_probs.item() == pytest.approx(1 / 7)


def test_groups_limit_the_choice_to_the_best_pair_sums() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.5, 0.5]], dtype=torch.float64)
    config = RouterConfig(num_experts=6, topk=2, score="sigmoid", num_groups=2, topk_groups=1)
    # Sums of two: 0.9 + 0.1 = 1.0 against 0.6 + 0.5 = 1.1.
    assert reference_routing(scores.logit(), config).topk_ids.tolist() == [[3, 4]]
