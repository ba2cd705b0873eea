"""Experts by Transformer Engine's `Sequential(GroupedLinear, ScaledSwiGLU, GroupedLinear)`.

On Blackwell with MXFP8 the three become one fused kernel (`te_fused`); the same module also runs un-fused in
bf16 on any GPU that Transformer Engine supports (`te_ops`), which is how its arithmetic is tested elsewhere.
Its slow twin is `isozyme.moe.experts.loop`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core import transformer_engine
from isozyme.core.config import Precision
from isozyme.core.errors import BackendError
from isozyme.core.precision import TRAITS
from isozyme.moe.experts.arrived import host_counts, no_rows
from isozyme.moe.experts.fused_mlp_conditions import INTERLEAVE, ROW_ALIGNMENT, fused_class
from isozyme.moe.experts.storage import ExpertWeights
from isozyme.moe.kernels.row_map import row_map
from isozyme.moe.kernels.rows import gather_rows, scatter_rows_and_probs
from isozyme.moe.types import Arrival


def interleave(gate_up: Float[Tensor, "E F2 H"]) -> Float[Tensor, "E F2 H"]:
    """Gate and up rows in alternating blocks of 32, as the kernel reads them: a physical layout."""
    return rearrange(gate_up, "e (two blocks k) h -> e (blocks two k) h", two=2, k=INTERLEAVE)


def deinterleave(gate_up: Float[Tensor, "E F2 H"]) -> Float[Tensor, "E F2 H"]:
    """The inverse of `interleave`: all gate rows, then all up rows."""
    return rearrange(gate_up, "e (blocks two k) h -> e (two blocks k) h", two=2, k=INTERLEAVE)


class TEFusedExperts:
    """The experts of one layer; call it with what arrived and the two weight stacks.

    The module's own copy of the gate-up weights is interleaved and refreshed in every forward; gradients come
    back in canonical order through the graph.

    Args:
        weights: the storage, for sizes and device.
        precision: mxfp8 (fused on Blackwell), or bf16 and fp32 (un-fused).
        require_fused: whether running un-fused is an error.

    Raises:
        BackendError: if Transformer Engine cannot be used here, and in the first forward if `require_fused`
            and the fused kernel was not taken.
    """

    def __init__(self, weights: ExpertWeights, precision: Precision, *, require_fused: bool) -> None:
        te = self._te = transformer_engine.load()
        traits = TRAITS[precision]
        down = weights.down[0]
        self._recipe = transformer_engine.recipe_for(precision) if traits.quantized else None
        self._alignment = ROW_ALIGNMENT if traits.quantized else 1
        self._require_fused = require_fused
        self._checked = False
        hidden, ffn = down.shape
        count = len(weights.down)
        options = {"bias": False, "device": "meta", "dtype": down.dtype}
        self._first = te.ops.GroupedLinear(count, hidden, 2 * ffn, **options)
        self._second = te.ops.GroupedLinear(count, ffn, hidden, **options)
        self._interleaved = torch.empty(count, 2 * ffn, hidden, device=down.device, dtype=down.dtype)
        for index in range(count):
            setattr(self._first, f"weight{index}", nn.Parameter(self._interleaved[index]))
            setattr(self._second, f"weight{index}", nn.Parameter(weights.down[index].detach()))
        activation = te.ops.ScaledSwiGLU(glu_interleave_size=INTERLEAVE)
        self._sequence = te.ops.Sequential(self._first, activation, self._second)
        self._parameters = [
            getattr(op, f"weight{index}") for op in (self._first, self._second) for index in range(count)
        ]

    def __call__(
        self, arrival: Arrival, gate_up: Float[Tensor, "E_local F2 H"], down: Float[Tensor, "E_local H F"]
    ) -> Float[Tensor, "N H"]:
        """For each arrived row the weighted sum over its local experts. Waits for the host at most once."""
        unit, experts = self._alignment, gate_up.shape[0]
        slot_row, counts, ends = row_map(arrival.expert_ids, arrival.kept, experts, unit)
        total = sum(-(-count // unit) * unit for count in host_counts(arrival, counts))
        if total == 0:
            return no_rows(arrival, gate_up, down)
        rows, weights = scatter_rows_and_probs(arrival.rows, arrival.probs, slot_row, total, counts, ends)
        splits = torch.diff(ends, prepend=ends.new_zeros(1)).long()
        result: Tensor = _Nested.apply(rows, weights.float(), gate_up, down, self, splits)  # type: ignore[no-untyped-call]
        return gather_rows(result, slot_row, counts, ends)

    def ran_fused(self) -> bool:
        """Whether the last forward took the fused kernel."""
        kind = fused_class()
        groups = self._sequence._module_groups
        return bool(groups) and kind is not None and isinstance(groups[0]._forward_ops[0][0], kind)

    def run(self, rows: Tensor, probs: Tensor, splits: Tensor) -> Tensor:
        """The module itself, on rows grouped and padded as it wants them."""
        context: AbstractContextManager[Any] = nullcontext()
        if self._recipe is not None:
            context = self._te.autocast(enabled=True, recipe=self._recipe)
        with context:
            result: Tensor = self._sequence(rows, splits, probs, splits)
        if self._require_fused and not self._checked:
            if not self.ran_fused():
                raise BackendError(
                    "experts=te_fused: Transformer Engine fell back to separate kernels although every known "
                    "condition is met. Use experts=te, or report the versions of transformer-engine, "
                    "nvidia-cudnn-frontend and nvidia-cutlass-dsl."
                )
            self._checked = True
        return result

    def refresh(self, gate_up: Tensor, down: Tensor) -> None:
        """Bring the module's weights up to date; `.data` because a pending backward holds the same values."""
        self._interleaved.data.copy_(interleave(gate_up))
        count = down.shape[0]
        for parameter, view in zip(self._parameters[count:], down.unbind(0), strict=True):
            parameter.data = view

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The module's weights: all gate-up, then all down."""
        return self._parameters


class _Nested(torch.autograd.Function):
    """Runs the module with a graph of its own, and hands its weight gradients to the stacks."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        gate_up: Tensor,
        down: Tensor,
        experts: TEFusedExperts,
        splits: Tensor,
    ) -> Tensor:
        experts.refresh(gate_up, down)
        with torch.enable_grad():
            inputs = rows.detach().requires_grad_(), probs.detach().requires_grad_()
            result = experts.run(*inputs, splits)
        ctx.graph = (result, inputs, experts.parameters)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        result, inputs, parameters = ctx.graph
        d_rows, d_probs, *d_weights = torch.autograd.grad(result, (*inputs, *parameters), grads[0])
        count = len(parameters) // 2
        d_gate_up = deinterleave(torch.stack(d_weights[:count]))
        return d_rows, d_probs, d_gate_up, torch.stack(d_weights[count:]), None, None
