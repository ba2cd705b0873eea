"""Backends that start from arrived rows, against the loop over grouped rows, in values and all gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.errors import UsageError
from isozyme.moe.experts import grouped_mm_fused
from isozyme.moe.experts.grouped_fp8 import grouped_fp8_experts
from isozyme.moe.experts.grouped_mm_fused import grouped_mm_fused_experts, most_rows
from isozyme.moe.types import Arrival, ArrivalFunction
from tests.moe.kept import kept_bytes

HIDDEN, FFN, EXPERTS = 16, 24, 4


def draw_arrival(rows: int, choices: int, seed: int, experts: int = EXPERTS) -> Arrival:
    """Skewed, distinct choices, some not kept; expert 1 gets nothing."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(rows, experts, generator=generator) * torch.linspace(1.0, 0.4, experts)
    score[:, 1] = -1.0
    ids = score.topk(choices, dim=1).indices
    return Arrival(
        rows=torch.randn(rows, HIDDEN, generator=generator).requires_grad_(),
        expert_ids=ids,
        kept=(torch.rand(rows, choices, generator=generator) < 0.7) & (ids != 1),
        probs=torch.rand(rows, choices, generator=generator).requires_grad_(),
        num_experts=experts,
    )


def row_by_row(arrival: Arrival, gate_up: Tensor, down: Tensor) -> Tensor:
    """The definition: every kept slot of every row on its own."""
    out = []
    for row, ids, kept, probs in zip(
        arrival.rows, arrival.expert_ids.tolist(), arrival.kept.tolist(), arrival.probs, strict=True
    ):
        total = torch.zeros_like(row) + 0 * probs.sum() + 0 * row
        for expert, keep, prob in zip(ids, kept, probs, strict=True):
            if keep:
                gate, up = (gate_up[expert] @ row).chunk(2)
                total = total + down[expert] @ (torch.nn.functional.silu(gate) * up * prob)
        out.append(total)
    zero = 0 * (gate_up.sum() + down.sum() + arrival.probs.sum())
    return (torch.stack(out) if out else arrival.rows) + zero


def draw_weights(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=generator).mul_(0.3).requires_grad_(),
        torch.randn(EXPERTS, HIDDEN, FFN, generator=generator).mul_(0.3).requires_grad_(),
    )


@given(st.integers(0, 12), st.integers(1, 3), st.integers(0, 2**31))
def test_fused_grouped_gemms_equal_the_definition(rows: int, choices: int, seed: int) -> None:
    arrival, (gate_up, down) = draw_arrival(rows, choices, seed), draw_weights(seed)
    leaves = (arrival.rows, arrival.probs, gate_up, down)
    upstream = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    found = grouped_mm_fused_experts(arrival, gate_up, down)
    want = row_by_row(arrival, gate_up, down)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    found_grads = torch.autograd.grad(found, leaves, upstream)
    for got, expected in zip(found_grads, torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found_grads[2][1], torch.zeros_like(gate_up[1]))
    assert torch.equal(found_grads[3][1], torch.zeros_like(down[1]))


def test_nothing_uninitialised_reaches_a_result_or_gradient() -> None:
    """With every fresh allocation filled with NaN, dropped slots leave no trace."""
    arrival, (gate_up, down) = draw_arrival(30, 2, 5), draw_weights(5)
    torch.use_deterministic_algorithms(True)
    try:
        found = grouped_mm_fused_experts(arrival, gate_up, down)
        grads = torch.autograd.grad(found.sum(), (arrival.rows, arrival.probs, gate_up, down))
    finally:
        torch.use_deterministic_algorithms(False)
    for tensor in (found, *grads):
        assert torch.isfinite(tensor).all()


def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernels run also on a CPU, interpreted; unlike their twins they leave unfilled rows alone."""
    pytest.importorskip("triton")
    from isozyme.moe.kernels import triton_rows as rows
    from isozyme.moe.kernels import triton_swiglu as swiglu

    for name, kernel in (
        ("run_scatter_rows_and_probs", lambda x, p, to, n: rows.launch_scatter_rows(x, p, to, n, None, None)),
        ("run_scatter_rows", lambda x, to, n: rows.launch_scatter_rows(x, None, to, n, None, None)[0]),
        ("run_gather_rows", lambda x, at: rows.launch_gather_rows(x, None, at)[0]),
        ("run_gather_rows_and_probs", rows.launch_gather_rows),
        ("run_swiglu_prob", swiglu.launch_swiglu_prob),
        ("run_swiglu_prob_backward", swiglu.launch_swiglu_prob_backward),
    ):
        monkeypatch.setattr(grouped_mm_fused, name, kernel)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets kernels; tests/gpu runs the compiled ones")
def test_bits_do_not_depend_on_what_unfilled_rows_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    arrival, (gate_up, down) = draw_arrival(12, 3, 6), draw_weights(6)
    assert 0 < arrival.kept.sum() < 0.8 * arrival.kept.numel()
    _with_kernels(monkeypatch)

    def everything() -> tuple[Tensor, ...]:
        found = grouped_mm_fused_experts(arrival, gate_up, down)
        upstream = torch.linspace(-1, 1, found.numel()).view(found.shape)
        leaves = (arrival.rows, arrival.probs, gate_up, down)
        return (found, *torch.autograd.grad(found, leaves, upstream))

    torch.use_deterministic_algorithms(True)
    try:
        poisoned = everything()
        # Now a fresh allocation holds whatever was there before.
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
        plain = everything()
    finally:
        torch.use_deterministic_algorithms(False)
    want = row_by_row(arrival, gate_up, down)
    torch.testing.assert_close(poisoned[0], want, rtol=1e-4, atol=1e-5)
    for one, two in zip(poisoned, plain, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, two)


@pytest.mark.parametrize("choices", [1, 4])
def test_buffers_have_a_row_for_each_slot_but_no_more_than_one_for_each_expert(choices: int) -> None:
    """Four choices of a token reach at most the two experts of this rank (of eight, say)."""
    slot_row, ends = torch.zeros(5, choices, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    assert most_rows(slot_row, ends) == 5 * min(choices, 2)


def test_a_row_may_have_more_choices_than_there_are_experts_here() -> None:
    """All choices but those of the local experts belong to other ranks, and are not kept."""
    gate_up, down = (stack[:2].detach().requires_grad_() for stack in draw_weights(8))
    ids = torch.tensor([[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 1]])
    kept = torch.tensor([[True, False, True, False], [False, False, True, False], [True, True, False, False]])
    arrival = Arrival(
        rows=torch.randn(3, HIDDEN).requires_grad_(),
        expert_ids=ids,
        kept=kept,
        probs=torch.rand(3, 4).requires_grad_(),
        num_experts=2,
    )
    leaves = (arrival.rows, arrival.probs, gate_up, down)
    found, want = grouped_mm_fused_experts(arrival, gate_up, down), row_by_row(arrival, gate_up, down)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    for got, expected in zip(
        torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [grouped_mm_fused_experts, grouped_fp8_experts])
def test_rows_that_would_overflow_the_buffers_are_refused(function: ArrivalFunction) -> None:
    """One of two rows chose the one expert here twice: three slots, and there is room for two."""
    gate_up, down = (stack[:1].bfloat16() for stack in draw_weights(8))
    arrival = Arrival(
        rows=torch.randn(2, HIDDEN).bfloat16(),
        expert_ids=torch.zeros(2, 2, dtype=torch.int64),
        kept=torch.tensor([[True, False], [False, True]]),
        probs=torch.rand(2, 2),
        num_experts=1,
    )
    function(arrival, gate_up, down)
    with pytest.raises(UsageError, match="2 rows and 1 experts make at most 2 slots, and 3 are kept"):
        function(replace(arrival, kept=torch.tensor([[True, True], [False, True]])), gate_up, down)


def test_only_the_input_the_pre_activation_and_the_map_are_saved() -> None:
    arrival, (gate_up, down) = draw_arrival(50, 2, 9), draw_weights(9)
    activations = kept_bytes(lambda: grouped_mm_fused_experts(arrival, gate_up, down), (gate_up, down))
    slots = arrival.kept.numel()
    spare = 4  # the place of what is not kept
    bound = arrival.rows.numel() * 4 + slots * 2 * FFN * 4 + slots * (4 + 4) + EXPERTS * 4 + spare
    assert activations <= bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_the_definition(dtype: torch.dtype) -> None:
    arrival, (gate_up, down) = draw_arrival(40, 2, 3), draw_weights(3)
    low = Arrival(
        rows=arrival.rows.to(dtype),
        expert_ids=arrival.expert_ids,
        kept=arrival.kept,
        probs=arrival.probs,
        num_experts=EXPERTS,
    )
    found = grouped_mm_fused_experts(low, gate_up.to(dtype), down.to(dtype)).float()
    want = row_by_row(arrival, gate_up, down)
    assert (found - want).norm() / want.norm() < 0.02
