"""Experts in FP8 by torch's grouped GEMMs, with row-wise scales: one kernel for all experts of a product.

It is `isozyme.moe.experts.grouped_mm_fused` with four of its six products in FP8. Forward and the gradients
of rows multiply E4M3 operands, with one scale for each row of the left one and for each column of the right
one. The weights' gradients are computed in the type of the rows: there the rows are the contraction, and an
FP8 product wants multiples of 16 of them in each group. torchao has the same recipe ("rowwise", with weight
gradients in high precision).

No step waits for the host, and no shape depends on the routing. Rows are quantised once, by token, as they
are permuted; activations and their gradients as SwiGLU makes them; weights in each pass, or once a step. Kept
for backward are the arrived rows, the pre-activation and the row map; transposed weights are made there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.moe.experts.arrived import no_rows
from isozyme.moe.experts.delayed import DelayedGradients
from isozyme.moe.experts.grouped_mm_fused import (
    arrived_row_map,
    down_gradient,
    gate_up_gradient,
    most_rows,
)
from isozyme.moe.experts.step_of_weights import StepOfWeights
from isozyme.moe.experts.storage import ExpertWeights, members
from isozyme.moe.kernels import direct
from isozyme.moe.kernels.quantized_scatter import run_scatter_quantized, scatter_quantized
from isozyme.moe.kernels.quantized_swiglu import (
    quantized_swiglu,
    quantized_swiglu_backward,
    run_quantized_swiglu,
    run_quantized_swiglu_backward,
)
from isozyme.moe.kernels.quantized_weights import (
    quantize_transposed,
    quantize_weights,
    run_quantize_transposed,
    run_quantize_weights,
)
from isozyme.moe.kernels.rows import (
    gather_rows,
    gather_rows_and_probs_op,
    run_gather_rows,
    run_gather_rows_and_probs,
)
from isozyme.moe.kernels.scaled_grouped_mm import run_scaled_grouped_mm, scaled_grouped_mm
from isozyme.moe.types import Arrival

FEATURE_UNIT = 16
"""Both dims of a weight must be a multiple of this: rows of 8-bit operands begin at multiples of 16 bytes."""


class StackCopies:
    """The 8-bit copies of one stack that are kept while it does not change, each made when first wanted."""

    def __init__(self) -> None:
        self._by_row: tuple[Tensor, Tensor, Tensor] | None = None
        self._transposed: tuple[Tensor, Tensor] | None = None

    def by_row(self, stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `quantize_weights`."""
        if self._by_row is None:
            self._by_row = run_quantize_weights(stack)
        return self._by_row

    def transposed(self, stack: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """As `quantize_transposed`."""
        if self._transposed is None:
            self._transposed = run_quantize_transposed(stack, maxima)
        return self._transposed


Kept = tuple[StackCopies | None, StackCopies | None]
"""Of gate-up and of down; None: quantise anew, and keep nothing."""


class _FP8Experts(torch.autograd.Function):
    """Permute, gate-up, weighted SwiGLU, down, unpermute, as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        gate_up: Tensor,
        down: Tensor,
        slot_row: Tensor,
        ends: Tensor,
        kept: Kept,
        delayed: DelayedGradients | None,
    ) -> Tensor:
        scatter = direct(scatter_quantized, run_scatter_quantized)
        codes, scales, weights, _ = scatter(x, probs, slot_row, most_rows(slot_row, ends), False)
        hidden, wide_maxima = _product(codes, scales, gate_up, ends, kept[0], x.dtype)
        codes, scales = direct(quantized_swiglu, run_quantized_swiglu)(hidden, weights, ends[-1:])
        result, narrow_maxima = _product(codes, scales, down, ends, kept[1], x.dtype)
        ctx.save_for_backward(x, hidden, weights, gate_up, down, slot_row, ends, wide_maxima, narrow_maxima)
        ctx.kept, ctx.delayed = kept, delayed
        tokens: Tensor = direct(gather_rows, run_gather_rows)(result, slot_row)
        return tokens

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, hidden, weights, gate_up, down, slot_row, ends, *maxima = ctx.saved_tensors
        delayed: DelayedGradients | None = ctx.delayed
        scatter = direct(scatter_quantized, run_scatter_quantized)
        upstream, num_rows = grads[0].contiguous(), most_rows(slot_row, ends)
        codes, scales, _, d_result = scatter(upstream, None, slot_row, num_rows, True)
        d_middle = _transposed_product(codes, scales, down, maxima[1], ends, ctx.kept[1], x.dtype)
        swiglu_backward = direct(quantized_swiglu_backward, run_quantized_swiglu_backward)
        codes, scales, d_hidden, d_weights, middle = swiglu_backward(d_middle, hidden, weights, ends[-1:])
        d_gate_up = d_down = None
        if delayed is None:
            d_down = down_gradient(d_result, middle, ends)
            del d_result, middle, d_middle
            d_gate_up = gate_up_gradient(d_hidden, x, slot_row, ends)
        else:
            delayed.leave(1, partial(down_gradient, d_result, middle, ends))
            delayed.leave(0, partial(gate_up_gradient, d_hidden, x, slot_row, ends))
            del d_result, middle, d_middle
        del d_hidden
        d_rows = _transposed_product(codes, scales, gate_up, maxima[0], ends, ctx.kept[0], x.dtype)
        gather = direct(gather_rows_and_probs_op, run_gather_rows_and_probs)
        d_x, d_probs = gather(d_rows, d_weights, slot_row)
        return d_x, d_probs, d_gate_up, d_down, None, None, None, None


def _product(
    codes: Tensor, scales: Tensor, stack: Tensor, ends: Tensor, kept: StackCopies | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows times the transposed weight of their expert, and the largest magnitudes of its columns."""
    quantize = direct(quantize_weights, run_quantize_weights) if kept is None else kept.by_row
    weight_codes, weight_scales, maxima = quantize(stack)
    multiply = direct(scaled_grouped_mm, run_scaled_grouped_mm)
    return multiply(codes, scales, weight_codes, weight_scales, ends, dtype), maxima


def _transposed_product(
    codes: Tensor,
    scales: Tensor,
    stack: Tensor,
    maxima: Tensor,
    ends: Tensor,
    kept: StackCopies | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradients of rows times the weight of their expert."""
    quantize = direct(quantize_transposed, run_quantize_transposed) if kept is None else kept.transposed
    result: Tensor = direct(scaled_grouped_mm, run_scaled_grouped_mm)(
        codes, scales, *quantize(stack, maxima), ends, dtype
    )
    return result


def grouped_fp8_experts(
    arrival: Arrival,
    gate_up: Float[Tensor, "E_local F2 H"],
    down: Float[Tensor, "E_local H F"],
    *,
    kept: Kept = (None, None),
    delayed: DelayedGradients | None = None,
) -> Float[Tensor, "N H"]:
    """For each arrived row the weighted sum over its local experts; see `ArrivalFunction`.

    With `delayed`, the operands of the weights' gradients live until those are computed. `kept` must be of
    these very weights.

    Raises:
        UsageError: if a row chose an expert twice, so that buffers are too small; on CUDA the device says so.
    """
    if arrival.rows.shape[0] == 0:
        return no_rows(arrival, gate_up, down)
    slot_row, ends = arrived_row_map(arrival, gate_up.shape[0])
    leaves = (arrival.rows, arrival.probs, gate_up, down)
    result: Tensor = _FP8Experts.apply(*leaves, slot_row, ends, kept, delayed)  # type: ignore[no-untyped-call]
    return result


class CachingFP8Experts:
    """`grouped_fp8_experts` whose weights are quantised once a step, not once a micro-batch.

    Both copies of a stack live from their first use in a step to the first use in the next: two bytes a
    weight. Passes without gradients, and those outside a step, quantise anew.

    Args:
        weights: the storage, whose parameters say in which step they are.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights
        self._steps = (StepOfWeights(), StepOfWeights())
        self._copies: Kept = (None, None)

    def __call__(
        self,
        arrival: Arrival,
        gate_up: Float[Tensor, "E_local F2 H"],
        down: Float[Tensor, "E_local H F"],
        *,
        delayed: DelayedGradients | None = None,
    ) -> Float[Tensor, "N H"]:
        """As `grouped_fp8_experts`."""
        return grouped_fp8_experts(arrival, gate_up, down, kept=self._kept(), delayed=delayed)

    def _kept(self) -> Kept:
        if not torch.is_grad_enabled():
            return None, None
        stacks = (members(self._weights.gate_up), members(self._weights.down))
        same = [step.same(stack) for step, stack in zip(self._steps, stacks, strict=True)]
        before = self._copies
        gate_up, down = (
            None if still is None else copies if still and copies is not None else StackCopies()
            for still, copies in zip(same, before, strict=True)
        )
        self._copies = (gate_up, down)
        return self._copies


def grouped_fp8_problems(device: torch.device, dtype: torch.dtype, hidden: int, ffn: int) -> list[str]:
    """Why the 8-bit products cannot run here, in words; empty if they can. `ffn` is this rank's share of F.

    On a CPU they are emulated: the same operands, multiplied in fp32.
    """
    found = []
    if dtype != torch.bfloat16:
        found.append(f"it stores rows and weights in bfloat16, not {str(dtype).removeprefix('torch.')}")
    for name, size in (("hidden", hidden), ("ffn", ffn)):
        if size % FEATURE_UNIT:
            found.append(
                f"rows of 8-bit operands must be multiples of {FEATURE_UNIT} bytes: {name}={size}; "
                f"{size} % {FEATURE_UNIT} = {size % FEATURE_UNIT}"
            )
    if device.type == "cuda" and not hasattr(torch, "_scaled_grouped_mm"):
        found.append(f"torch {torch.__version__} has no torch._scaled_grouped_mm; update torch")
    if device.type not in ("cpu", "cuda", "meta"):
        found.append(f"it runs on cpu and cuda, not {device.type}")
    return found
