"""Experts by Transformer Engine's `GroupedLinear`, in bf16 or with FP8 or MXFP8 operands.

The modules are built empty and compute with our storage: their weights are views of the stacks, so weights,
optimiser and checkpoints are those of every other backend. Rows are permuted and padded in one pass, after
the exchange. Its slow twin is `isozyme.moe.experts.loop`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.core import transformer_engine
from isozyme.core.config import Precision
from isozyme.core.precision import TRAITS, precision_problems
from isozyme.moe.experts.arrived import host_counts_start, no_rows
from isozyme.moe.experts.delayed import DelayedGradients, reach
from isozyme.moe.experts.storage import ExpertWeights, members
from isozyme.moe.experts.te_linear import EmptyGroupedLinear, Quantized
from isozyme.moe.kernels.row_map import row_map
from isozyme.moe.kernels.rows import gather_rows, scatter_rows_and_probs
from isozyme.moe.kernels.swiglu import swiglu_prob
from isozyme.moe.types import Arrival
from isozyme.parallel.main_grad import written_wide


def te_problems(
    device: torch.device, dtype: torch.dtype, hidden: int, ffn: int, precision: Precision
) -> list[str]:
    """Why Transformer Engine's grouped linear layers cannot run here, in words; empty if they can.

    Args:
        device: where the weights are.
        dtype: type of rows and weights.
        hidden: H.
        ffn: this rank's share of F.
        precision: precision of the GEMMs.
    """
    found = []
    reason = transformer_engine.why_not()
    if reason is not None:
        found.append(reason)
    if device.type != "cuda":
        found.append(f"its kernels run on CUDA, not on {device.type}")
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        found.append(f"it multiplies bf16, fp16 and fp32, not {str(dtype).removeprefix('torch.')}")
    if precision == "mxfp8_emulated":
        found.append("precision=mxfp8_emulated is plain PyTorch: use experts=mxfp8_emulated")
    on_cuda = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if on_cuda else None
    found += precision_problems(precision, capability)
    unit = TRAITS[precision].feature_alignment
    for name, size in (("hidden", hidden), ("ffn", ffn)):
        if size % unit:
            found.append(f"precision={precision} needs {name} divisible by {unit}: {name}={size}")
    return found


def row_unit(alignment: int, rows: int, experts: int) -> int:
    """What the rows of each expert are padded to a multiple of: the quantiser's unit, or more of little cost.

    cuBLASLt searches for a kernel whenever it meets a number of rows for the first time, which takes the host
    ten times as long as the launch (100 to 170 µs); so there should be few different numbers. At most 1/32 of
    an even share of the rows, and 128.

    Args:
        alignment: what the quantiser asks for, a power of two.
        rows: that arrived.
        experts: of this rank.

    >>> row_unit(16, rows=8192, experts=4), row_unit(16, rows=100, experts=4)
    (64, 16)
    """
    most, unit = min(128, rows // (32 * experts)), alignment
    while 2 * unit <= most:
        unit *= 2
    return unit


class TEExperts:
    """The experts of one layer; call it with what arrived and the two weight stacks.

    Where the parameters have a `main_grad`, weight gradients are added to it by the GEMM itself (in fp32),
    and none flows through the graph; elsewhere each parameter gets its own, without passing through the
    stacks. So `main_grad` of less than fp32 would round them, and the parameters say that theirs is fp32.

    Args:
        weights: the storage, for its parameters' `main_grad`.
        precision: precision of the GEMMs: fp32, bf16, fp8_current, fp8_block, fp8_delayed or mxfp8.
        delay_wgrad: take `delayed`, and compute the weights' gradients when it says so.
        cache_quantized: quantise the weights once a step, not once a micro-batch.

    Raises:
        BackendError: if Transformer Engine cannot be used here.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        precision: Precision,
        *,
        delay_wgrad: bool = False,
        cache_quantized: bool = False,
    ) -> None:
        self._te = transformer_engine.load()
        self._weights = weights
        written_wide(weights.parameters())
        traits = TRAITS[precision]
        self._alignment = traits.row_alignment
        self._recipe = transformer_engine.recipe_for(precision) if traits.quantized else None
        # Delayed scaling takes its scales from the passes before, in an order that is Transformer Engine's.
        self._early = traits.quantized and precision != "fp8_delayed"
        down = weights.down[0]
        hidden, ffn = down.shape
        count = len(weights.down)
        self._gate_up, self._down = (
            EmptyGroupedLinear(self._te, down, count, *sizes, delay=delay_wgrad, cache=cache_quantized)
            for sizes in ((hidden, 2 * ffn), (ffn, hidden))
        )

    def __call__(
        self,
        arrival: Arrival,
        gate_up: Float[Tensor, "E_local F2 H"],
        down: Float[Tensor, "E_local H F"],
        *,
        delayed: DelayedGradients | None = None,
    ) -> Float[Tensor, "N H"]:
        """For each arrived row the weighted sum over its local experts. Waits for the host at most once."""
        experts = gate_up.shape[0]
        unit = row_unit(self._alignment, len(arrival.rows), experts)
        slot_row, counts, ends = row_map(arrival.expert_ids, arrival.kept, experts, unit)
        await_counts = host_counts_start(arrival, counts)
        early = self._quantized_early() if arrival.host_counts is None else (None, None)
        splits = [-(-count // unit) * unit for count in await_counts()]
        if sum(splits) == 0:
            return no_rows(arrival, gate_up, down)
        rows, weights = scatter_rows_and_probs(
            arrival.rows, arrival.probs, slot_row, sum(splits), counts, ends
        )
        if delayed is not None:
            rows = reach(rows, gate_up, down)
        with self._autocast():
            hidden = self._gate_up(rows, splits, members(self._weights.gate_up), early[0])
            middle = swiglu_prob(hidden, weights)
            result = self._down(middle, splits, members(self._weights.down), early[1])
        if delayed is not None:
            delayed.leave(0, self._gate_up.gradient_later())
            delayed.leave(1, self._down.gradient_later())
        return gather_rows(result, slot_row, counts, ends)

    def _quantized_early(self) -> tuple[Quantized | None, Quantized | None]:
        """Quantised weights, which need no counts: the device makes them while the host waits for those."""
        if not self._early:
            return None, None
        weights = self._weights
        return self._gate_up.quantized(members(weights.gate_up)), self._down.quantized(members(weights.down))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._recipe is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._te.autocast(enabled=True, recipe=self._recipe)
        return context
