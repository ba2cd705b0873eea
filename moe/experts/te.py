"""Experts by Transformer Engine's `GroupedLinear`, in bf16 or with FP8 or MXFP8 operands.

The modules are built empty and compute with our storage: their weights are views of the stacks, so weights,
optimiser and checkpoints are those of every other backend. Rows are permuted and padded in one pass, after
the exchange. Its slow twin is `isozyme.moe.experts.loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_not
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core import transformer_engine
from isozyme.core.config import Precision
from isozyme.core.errors import BackendError
from isozyme.core.precision import TRAITS, precision_problems
from isozyme.moe.experts.arrived import host_counts, no_rows
from isozyme.moe.experts.delayed import DelayedGradients, Later, reach
from isozyme.moe.experts.step_of_weights import StepOfWeights
from isozyme.moe.experts.storage import ExpertWeights, members
from isozyme.moe.experts.te_main_grad import claim_in_backward
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
    if precision == "fp8_rowwise":
        found.append(
            "precision=fp8_rowwise has one scale a row, which it has no recipe for: use experts=grouped_fp8"
        )
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
        cache_quantized: quantise the weights once a step, not once a micro-batch; see `StepOfWeights`.

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
        down = weights.down[0]
        hidden, ffn = down.shape
        count = len(weights.down)
        self._gate_up, self._down = (
            _EmptyGroupedLinear(self._te, down, count, *sizes, delay=delay_wgrad, cache=cache_quantized)
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
        splits = [-(-count // unit) * unit for count in host_counts(arrival, counts)]
        if sum(splits) == 0:
            return no_rows(arrival, gate_up, down)
        rows, weights = scatter_rows_and_probs(
            arrival.rows, arrival.probs, slot_row, sum(splits), counts, ends
        )
        if delayed is not None:
            rows = reach(rows, gate_up, down)
        with self._autocast():
            hidden = self._gate_up(rows, splits, members(self._weights.gate_up))
            middle = swiglu_prob(hidden, weights)
            result = self._down(middle, splits, members(self._weights.down))
        if delayed is not None:
            delayed.leave(0, self._gate_up.gradient_later())
            delayed.leave(1, self._down.gradient_later())
        return gather_rows(result, slot_row, counts, ends)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._recipe is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self._te.autocast(enabled=True, recipe=self._recipe)
        return context


class _EmptyGroupedLinear:
    """A `te.GroupedLinear` without weights of its own.

    Args:
        te: the package.
        like: says the type and the device of the weights.
        count: how many GEMMs.
        inputs: width of a row.
        outputs: width of a result.
        delay: leave the weights' gradients to `gradient_later`.
        cache: keep quantised weights while a step lasts.
    """

    def __init__(
        self, te: Any, like: Tensor, count: int, inputs: int, outputs: int, *, delay: bool, cache: bool
    ) -> None:
        self._module = te.GroupedLinear(
            count,
            inputs,
            outputs,
            bias=False,
            params_dtype=like.dtype,
            device="meta",
            delay_wgrad_compute=delay,
        )
        if cache and not hasattr(self._module, "_fp8_workspaces"):
            raise BackendError(
                "experts=te: this version of Transformer Engine keeps quantised weights elsewhere than "
                "2.20.2 does. Set model.moe.cache_quantized_weights=false."
            )
        self._delay, self._cached = delay, StepOfWeights() if cache else None
        self._leaves: tuple[nn.Parameter, ...] = ()
        self._targets: tuple[Tensor | None, ...] = ()
        for index in range(count):
            delattr(self._module, f"weight{index}")
            setattr(self._module, f"bias{index}", like.new_empty(0))

    def __call__(
        self, rows: Float[Tensor, "R I"], splits: list[int], parameters: Sequence[nn.Parameter]
    ) -> Float[Tensor, "R O"]:
        fused = torch.is_grad_enabled() and all(hasattr(p, "main_grad") for p in parameters)
        self._module.fuse_wgrad_accumulation = fused
        leaves = fused or self._delay
        self._bind(self._leaves_of(parameters) if leaves else [_matrix(p) for p in parameters])
        result: Tensor = self._module(rows, splits, is_first_microbatch=self._first(parameters))
        if fused:
            claim_in_backward(result, parameters)
        return result

    def gradient_later(self) -> Later:
        """What computes the weights' gradients of the pass just made, once its backward has been here.

        The gradients as a stack, or None where they were added to `main_grad`.
        """
        fused, leaves = self._module.fuse_wgrad_accumulation, self._leaves

        def compute() -> Tensor | None:
            # A later pass, such as an evaluation, may have set these otherwise.
            self._module.fuse_wgrad_accumulation = fused
            self._bind(leaves)
            self._module.backward_dw()
            if fused:
                return None
            gradients = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            return torch.stack([each for each in gradients if each is not None])

        return compute

    def _first(self, parameters: Sequence[nn.Parameter]) -> bool | None:
        """Transformer Engine's `is_first_microbatch`: None to quantise anew, False to use a kept copy if any.

        Never True, which would also overwrite `main_grad`.
        """
        if self._cached is None or not torch.is_grad_enabled():
            return None
        valid = self._cached.same(parameters)
        if not valid:
            self._module._fp8_workspaces.clear()
        return None if valid is None else False

    def _bind(self, weights: Sequence[Tensor]) -> None:
        for index, weight in enumerate(weights):
            self._module.__dict__[f"weight{index}"] = weight

    def _leaves_of(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """Leaves that view ours and whose `main_grad` views ours, so that no gradient enters the graph."""
        if len(self._leaves) != len(parameters) or self._leaves[0].data_ptr() != parameters[0].data_ptr():
            self._leaves = tuple(nn.Parameter(_matrix(parameter.detach())) for parameter in parameters)
            self._targets = ()
        targets = tuple(getattr(parameter, "main_grad", None) for parameter in parameters)
        if len(targets) != len(self._targets) or any(map(is_not, targets, self._targets)):
            self._targets = targets
            for leaf, target in zip(self._leaves, targets, strict=True):
                if target is not None:
                    leaf.main_grad = target.view(leaf.shape)  # type: ignore[attr-defined]
        return self._leaves


def _matrix(weight: Tensor) -> Tensor:
    """A weight as the matrix `[out, in]`: gate-up `[2, F, H]` becomes `[2F, H]`, without a copy."""
    return weight.flatten(0, -2)
