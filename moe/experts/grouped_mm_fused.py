"""Experts by torch's grouped GEMMs with the kernels of `isozyme.moe.kernels` around them.

It starts from rows as they arrived, not from sorted ones: the permutation is part of the function, so that
what is kept for backward is the arrived rows, the pre-activation and the row map, and nothing that can be
had again without a GEMM. No step waits for the host. Its slow twin is `isozyme.moe.experts.loop`.

How many rows there are, the last of `ends`, is therefore known on the device only, and buffers are allocated
for the most that there can be. Rows beyond are never written, and nobody reads them: grouped GEMMs stop at
`ends`, kernels at the last of them, and row maps name no such row.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.errors import UsageError
from isozyme.moe.experts.arrived import no_rows
from isozyme.moe.experts.delayed import DelayedGradients
from isozyme.moe.kernels import direct
from isozyme.moe.kernels.row_map import MAX_EXPERTS, row_map, run_row_map
from isozyme.moe.kernels.rows import (
    gather_rows,
    gather_rows_and_probs_op,
    run_gather_rows,
    run_gather_rows_and_probs,
    run_scatter_rows,
    run_scatter_rows_and_probs,
    scatter_rows,
    scatter_rows_and_probs_op,
)
from isozyme.moe.kernels.swiglu import (
    run_swiglu_prob,
    run_swiglu_prob_backward,
    swiglu_prob,
    swiglu_prob_backward,
)
from isozyme.moe.types import Arrival


class _FusedExperts(torch.autograd.Function):
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
        delayed: DelayedGradients | None,
    ) -> Tensor:
        num_rows = most_rows(slot_row, ends)
        scatter = direct(scatter_rows_and_probs_op, run_scatter_rows_and_probs)
        rows, weights = scatter(x, probs, slot_row, num_rows)
        hidden = F.grouped_mm(rows, gate_up.mT, offs=ends)
        middle = direct(swiglu_prob, run_swiglu_prob)(hidden, weights, ends[-1:])
        result = F.grouped_mm(middle, down.mT, offs=ends)
        ctx.save_for_backward(x, hidden, weights, gate_up, down, slot_row, ends)
        ctx.delayed = delayed
        tokens: Tensor = direct(gather_rows, run_gather_rows)(result, slot_row)
        return tokens

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, hidden, weights, gate_up, down, slot_row, ends = ctx.saved_tensors
        delayed: DelayedGradients | None = ctx.delayed
        num_rows = most_rows(slot_row, ends)
        d_result = direct(scatter_rows, run_scatter_rows)(grads[0].contiguous(), slot_row, num_rows)
        d_middle = F.grouped_mm(d_result, down, offs=ends)
        d_hidden, d_weights, middle = direct(swiglu_prob_backward, run_swiglu_prob_backward)(
            d_middle, hidden, weights, ends[-1:]
        )
        d_gate_up = d_down = None
        if delayed is None:
            d_down = down_gradient(d_result, middle, ends)
            del d_result, middle, d_middle
            d_gate_up = gate_up_gradient(d_hidden, x, slot_row, ends)
        else:
            delayed.leave(1, partial(down_gradient, d_result, middle, ends))
            delayed.leave(0, partial(gate_up_gradient, d_hidden, x, slot_row, ends))
            del d_result, middle, d_middle
        d_rows = F.grouped_mm(d_hidden, gate_up, offs=ends)
        gather = direct(gather_rows_and_probs_op, run_gather_rows_and_probs)
        d_x, d_probs = gather(d_rows, d_weights, slot_row)
        return d_x, d_probs, d_gate_up, d_down, None, None, None


def most_rows(slot_row: Int[Tensor, "N K"], ends: Int[Tensor, "E_local"]) -> int:
    """How many rows N arrived tokens can make: each goes to an expert once, and there are E_local of them."""
    return slot_row.shape[0] * min(slot_row.shape[1], ends.numel())


def arrived_row_map(arrival: Arrival, num_experts: int) -> tuple[Int[Tensor, "N K"], Int[Tensor, "E_local"]]:
    """The row of each arrived slot, and where each expert's rows end (`row_map`, without padding).

    Raises:
        UsageError: as `_refuse_repeated`.
    """
    slot_row, _, ends = direct(row_map, run_row_map)(arrival.expert_ids, arrival.kept, num_experts, 1)
    _refuse_repeated(slot_row, ends)
    return slot_row, ends


def _refuse_repeated(slot_row: Int[Tensor, "N K"], ends: Int[Tensor, "E_local"]) -> None:
    """Refuse rows with more kept slots than there are experts: they would be written beyond the buffers.

    Only where a row has more choices than this rank has experts is there anything to look at. On CUDA the
    device checks it, and nothing waits.

    Raises:
        UsageError: if some row chose an expert twice, and there are more slots than `most_rows`.
    """
    most = most_rows(slot_row, ends)
    if most == slot_row.numel():
        return
    rule = "a row's kept experts must be distinct"
    fits = ends[-1] <= most
    if fits.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(fits, rule)
    elif not fits:
        rows, experts = slot_row.shape[0], ends.numel()
        raise UsageError(
            f"{rule}: {rows} rows and {experts} experts make at most {most} slots, and {int(ends[-1])} are "
            "kept. Give each row an expert once."
        )


def down_gradient(
    d_result: Float[Tensor, "R H"], middle: Float[Tensor, "R F"], ends: Int[Tensor, "E_local"]
) -> Float[Tensor, "E_local H F"]:
    """The gradient of the down stack, from its product's upstream gradient and input by row."""
    return F.grouped_mm(d_result.mT, middle, offs=ends)


def gate_up_gradient(
    d_hidden: Float[Tensor, "R F2"],
    x: Float[Tensor, "N H"],
    slot_row: Int[Tensor, "N K"],
    ends: Int[Tensor, "E_local"],
) -> Float[Tensor, "E_local F2 H"]:
    """The gradient of the gate-up stack; the rows of its product's input are permuted for it again."""
    rows = direct(scatter_rows, run_scatter_rows)(x, slot_row, most_rows(slot_row, ends))
    return F.grouped_mm(d_hidden.mT, rows, offs=ends)


def grouped_mm_fused_experts(
    arrival: Arrival,
    gate_up: Float[Tensor, "E_local F2 H"],
    down: Float[Tensor, "E_local H F"],
    *,
    delayed: DelayedGradients | None = None,
) -> Float[Tensor, "N H"]:
    """For each arrived row the weighted sum over its local experts; see `ArrivalFunction`.

    With `delayed`, the operands of the weights' gradients (those of both products, and the activation)
    live until those are computed.

    Raises:
        UsageError: if a row chose an expert twice, so that buffers are too small; on CUDA the device says so.
    """
    if arrival.rows.shape[0] == 0:
        return no_rows(arrival, gate_up, down)
    slot_row, ends = arrived_row_map(arrival, gate_up.shape[0])
    leaves = (arrival.rows, arrival.probs, gate_up, down)
    result: Tensor = _FusedExperts.apply(*leaves, slot_row, ends, delayed)  # type: ignore[no-untyped-call]
    return result


def grouped_mm_fused_problems(device: torch.device, num_local_experts: int) -> list[str]:
    """Why the kernels cannot run here, in words; empty if they can. The GEMMs' own are `grouped_mm_problems`.

    On a CPU each kernel's twin runs instead: right, and no faster than `grouped_mm`.
    """
    found = []
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        found.append("its kernels need triton, which is not installed")
    if num_local_experts > MAX_EXPERTS:
        found.append(f"its row map takes {MAX_EXPERTS} experts a rank at most: {num_local_experts} are here")
    return found
