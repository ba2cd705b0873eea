"""The emulated MXFP8 experts against products of operands that were quantised block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from isozyme.core.mxfp8 import BLOCK, round_to_mxfp8
from isozyme.moe.experts.loop import loop_experts
from isozyme.moe.experts.mxfp8_emulated import (
    mxfp8_emulated_experts,
    mxfp8_emulated_problems,
    quantized_linear,
)
from isozyme.moe.kernels.swiglu import weighted_swiglu
from isozyme.moe.types import Dispatched

HIDDEN, FFN = 64, 96


def blockwise(x: Tensor, dim: int) -> Tensor:
    """Quantise each block of 32 on its own, zero-padded."""
    pieces = []
    for piece in x.split(BLOCK, dim=dim):
        missing = BLOCK - piece.shape[dim]
        padding = (0, missing) if dim == 1 else (0, 0, 0, missing)
        whole = torch.nn.functional.pad(piece, padding)
        pieces.append(round_to_mxfp8(whole, dim=dim).narrow(dim, 0, piece.shape[dim]))
    return torch.cat(pieces, dim=dim)


def make(counts: list[int]) -> tuple[Dispatched, Tensor, Tensor]:
    total = sum(counts)
    dispatched = Dispatched(
        rows=torch.randn(total, HIDDEN).requires_grad_(),
        probs=torch.rand(total).requires_grad_(),
        tokens_per_expert=torch.tensor(counts),
        num_rows=total,
        host_counts=tuple(counts),
    )
    gate_up = (torch.randn(len(counts), 2 * FFN, HIDDEN) * 0.2).requires_grad_()
    return dispatched, gate_up, (torch.randn(len(counts), HIDDEN, FFN) * 0.2).requires_grad_()


def test_each_operand_is_quantised_along_its_contraction_dim() -> None:
    x, weight = torch.randn(44, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
    grad = torch.randn(44, 96)
    out = quantized_linear(x, weight)
    d_x, d_weight = torch.autograd.grad(out, (x, weight), grad)
    torch.testing.assert_close(out, blockwise(x, 1) @ blockwise(weight, 1).T)
    torch.testing.assert_close(d_x, blockwise(grad, 1) @ blockwise(weight, 0))
    torch.testing.assert_close(d_weight, blockwise(grad, 0).T @ blockwise(x, 0))


def test_blocks_do_not_cross_experts_whatever_the_splits() -> None:
    counts = [0, 1, 31, 33, 44]
    dispatched, gate_up, down = make(counts)
    out = mxfp8_emulated_experts(dispatched.rows, dispatched.probs, gate_up, down, dispatched)
    grads = torch.autograd.grad(out.sum(), (dispatched.rows, gate_up, down), retain_graph=True)
    start = 0
    for expert, count in enumerate(counts):
        rows = dispatched.rows[start : start + count]
        alone = quantized_linear(
            weighted_swiglu(
                quantized_linear(rows, gate_up[expert]), dispatched.probs[start : start + count], rows.dtype
            ),
            down[expert],
        )
        torch.testing.assert_close(out[start : start + count], alone)
        on_own = torch.autograd.grad(alone.sum(), (gate_up, down), retain_graph=True)
        torch.testing.assert_close(grads[1][expert], on_own[0][expert])
        torch.testing.assert_close(grads[2][expert], on_own[1][expert])
        start += count
    assert torch.equal(grads[1][0], torch.zeros_like(grads[1][0]))


def test_quantisation_changes_results_but_not_much() -> None:
    dispatched, gate_up, down = make([40, 64, 10])
    leaves = (dispatched.rows, dispatched.probs, gate_up, down)
    quantized = mxfp8_emulated_experts(dispatched.rows, dispatched.probs, gate_up, down, dispatched)
    exact = loop_experts(dispatched.rows, dispatched.probs, gate_up, down, dispatched)
    upstream = torch.randn_like(exact)
    pairs = [(quantized, exact)]
    pairs += zip(
        torch.autograd.grad(quantized, leaves, upstream),
        torch.autograd.grad(exact, leaves, upstream),
        strict=True,
    )
    for got, want in pairs:
        error = (got - want).norm() / want.norm()
        assert 1e-3 < error < 0.1


def test_sizes_must_be_whole_blocks() -> None:
    assert mxfp8_emulated_problems(64, 96) == []
    assert "hidden=70" in mxfp8_emulated_problems(70, 96)[0]
