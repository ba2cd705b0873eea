"""The router's product for bf16: at least fp32 everywhere, and no tensor of all tokens in fp32.

The product of two bf16 numbers is exact in fp32, so a bf16 GEMM that adds in fp32 and returns fp32 gives what
one of widened operands gives. Backward has an fp32 operand, the gradient of the logits: it is written as the
exact sum of three bf16 numbers (8 bits of the significand each; Henry, Tang and Heinecke 2019,
arXiv:1904.06376), whose products are added in fp32 likewise. Widened tokens would cost more than these
products: H is much larger than E, so what counts is reading and writing them, and keeping them for backward
takes twice the memory of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

PARTS = 3
"""bf16 numbers that sum to one of fp32."""


def bf16_logits(
    tokens: Float[Tensor, "T H"], weight: Float[Tensor, "E H"], token_valid: Bool[Tensor, "T"]
) -> Float[Tensor, "T E"]:
    """`tokens @ weight.T` in fp32, of bf16 operands; zeros for padding, whatever it holds.

    Its slow twin is `F.linear` of both in fp32, with zeros in place of padding. Gradients are rounded once,
    to bf16. Kept for backward: the operands themselves. It can be differentiated once.
    """
    logits: Tensor = _Logits.apply(tokens, weight, token_valid)  # type: ignore[no-untyped-call]
    return logits


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, token_valid: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight, token_valid)
        return torch.where(token_valid[:, None], _product(tokens, weight.T), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight, token_valid = ctx.saved_tensors
        need_tokens, need_weight, _ = ctx.needs_input_grad
        parts = bf16_parts(torch.where(token_valid[:, None], grad, 0.0)).flatten(1)
        d_tokens = d_weight = None
        if need_tokens:
            d_tokens = parts @ weight.repeat(PARTS, 1)
        if need_weight:
            # Padding may hold anything, NaN included: not even a zero gradient may be multiplied by it.
            real = torch.where(token_valid[:, None], tokens, 0.0)
            d_weight = _product(parts.T, real).unflatten(0, (PARTS, -1)).sum(dim=0).to(weight.dtype)
        return d_tokens, d_weight, None


def bf16_parts(x: Float[Tensor, "T E"]) -> Float[Tensor, "T 3 E"]:
    """Three bf16 numbers whose sum is the fp32 number, from the largest to the smallest.

    Exact unless the smallest underflows: for magnitudes from about 1e-33, and otherwise to within 1e-40.
    """
    parts = x.new_empty((x.shape[0], PARTS, x.shape[1]), dtype=torch.bfloat16)
    for index in range(PARTS):
        if index:
            x = x - parts[:, index - 1]
        parts[:, index] = x
    return parts


def _product(a: Float[Tensor, "M K"], b: Float[Tensor, "K N"]) -> Float[Tensor, "M N"]:
    """`a @ b` of bf16 operands in fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
