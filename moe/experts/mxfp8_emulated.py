"""Experts whose GEMMs see what MXFP8 hardware would see, in plain PyTorch on any device.

Each operand of each of the six GEMMs is quantised along its contraction dim, from the high-precision source,
and multiplied in fp32; so convergence in MXFP8 can be studied without Blackwell. The format is bit-exact (
`isozyme.core.mxfp8`), the sums are not: hardware adds in another order, and the fused kernel quantises the
activation from fp32 accumulators. Without quantisation it is `isozyme.moe.experts.loop`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.core.mxfp8 import BLOCK, round_to_mxfp8
from isozyme.moe.experts.loop import loop_experts
from isozyme.moe.types import Dispatched


class _QuantizedLinear(torch.autograd.Function):
    """`x @ weight.T` with MXFP8 operands in the forward product and in both gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (round_to_mxfp8(x, dim=1) @ round_to_mxfp8(weight, dim=1).T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        d_x = (round_to_mxfp8(grad, dim=1) @ round_to_mxfp8(weight, dim=0)).to(x.dtype)
        d_weight = (round_to_mxfp8(grad, dim=0).T @ round_to_mxfp8(x, dim=0)).to(weight.dtype)
        return d_x, d_weight


def quantized_linear(x: Float[Tensor, "N I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "N O"]:
    """`x @ weight.T` as MXFP8 training computes it, and its gradients likewise.

    Rows count as padded with zeros to a multiple of 32, which changes no scale and no product.
    """
    result: Tensor = _QuantizedLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def mxfp8_emulated_experts(
    rows: Float[Tensor, "R H"],
    probs: Float[Tensor, "R"],
    gate_up: Float[Tensor, "E_local F2 H"],
    down: Float[Tensor, "E_local H F"],
    dispatched: Dispatched,
    *,
    recompute: bool = False,
) -> Float[Tensor, "R H"]:
    """`loop_experts` with quantised products; blocks never cross an expert's rows."""
    return loop_experts(rows, probs, gate_up, down, dispatched, recompute=recompute, linear=quantized_linear)


def mxfp8_emulated_problems(hidden: int, ffn: int) -> list[str]:
    """Why the emulation cannot run, in words; empty if it can. `ffn` is this rank's share of F."""
    return [
        f"MXFP8 scales blocks of {BLOCK}: {name} must be a multiple of {BLOCK}, {name}={size}"
        for name, size in (("hidden", hidden), ("ffn", ffn))
        if size % BLOCK
    ]
