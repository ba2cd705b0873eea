"""Experts by torch's grouped matrix multiplication: one kernel for all experts of a projection.

Held to `isozyme.moe.experts.loop` by the tests. The kernel finds its groups by int32 offsets on the device,
so nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isozyme.moe.experts.activation import through_swiglu
from isozyme.moe.experts.delayed import DelayedGradients
from isozyme.moe.experts.loop import fill_rows
from isozyme.moe.kernels.swiglu import weighted_swiglu
from isozyme.moe.types import Dispatched

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernel multiplies (float64 is refused by torch)."""
STRIDE_BYTES = 16
"""The kernel wants each row to begin at a multiple of this."""
MAX_ROWS = 2**31 - 1
"""The largest int32 offset."""


def grouped_linear(
    rows: Float[Tensor, "N I"],
    weight: Float[Tensor, "G O I"],
    offsets: Tensor,
    *,
    delayed: DelayedGradients | None = None,
    stack: int = 0,
) -> Float[Tensor, "N O"]:
    """`rows @ weight[g].T` for the rows of each group g, which end at `offsets[g]` (int32, on the device).

    With `delayed`, backward leaves the weight's gradient there, as that of `stack`.
    """
    if delayed is not None:
        late: Tensor = _DelayedLinear.apply(rows, weight, offsets, delayed, stack)  # type: ignore[no-untyped-call]
        return late
    result: Tensor = F.grouped_mm(rows, rearrange(weight, "g o i -> g i o"), offs=offsets)
    return _ContiguousGradient.apply(result)  # type: ignore[no-untyped-call]


class _DelayedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, delayed: DelayedGradients, stack: int
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.delayed, ctx.stack = delayed, stack
        result: Tensor = F.grouped_mm(rows, weight.mT, offs=offsets)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight, offsets = ctx.saved_tensors
        grad = grads[0].contiguous()
        ctx.delayed.leave(ctx.stack, lambda: F.grouped_mm(grad.mT, rows, offs=offsets))
        return F.grouped_mm(grad, weight, offs=offsets), None, None, None, None


class _ContiguousGradient(torch.autograd.Function):
    """Identity; its gradient is made contiguous, which the kernel's backward requires."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0].contiguous()


def row_offsets(tokens_per_expert: Tensor, num_rows: int) -> Tensor:
    """The end of each expert's rows as int32, the only type that the kernel takes.

    Raises:
        OverflowError: if there are more rows than an int32 can count.
    """
    if num_rows > MAX_ROWS:
        raise OverflowError(
            f"grouped_mm counts rows in int32: {num_rows} rows exceed {MAX_ROWS}. Use a smaller micro-batch."
        )
    return tokens_per_expert.cumsum(0).to(torch.int32)


def grouped_mm_experts(
    rows: Float[Tensor, "R H"],
    probs: Float[Tensor, "R"],
    gate_up: Float[Tensor, "E_local F2 H"],
    down: Float[Tensor, "E_local H F"],
    dispatched: Dispatched,
    *,
    recompute: bool = False,
    delayed: DelayedGradients | None = None,
) -> Float[Tensor, "R H"]:
    """Two grouped GEMMs with the weighted SwiGLU between them; see `ExpertFunction`.

    With `recompute` the activation is made a second time in backward, instead of being kept.
    With `delayed` backward leaves the weights' gradients there.
    """
    real = dispatched.num_rows
    if real == 0:
        return fill_rows(_no_rows(rows[:0], probs[:0], gate_up, down), rows.shape[0])
    offsets = row_offsets(dispatched.tokens_per_expert, real)
    result = through_swiglu(
        grouped_linear(rows[:real], gate_up, offsets, delayed=delayed, stack=0),
        probs[:real],
        rows.dtype,
        lambda middle: grouped_linear(middle, down, offsets, delayed=delayed, stack=1),
        again=recompute,
    )
    return fill_rows(result, rows.shape[0])


def _no_rows(rows: Tensor, probs: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A rank without rows: no kernel is called, yet all inputs stay in the graph, with zero gradients."""
    width = down.shape[2]
    wide = F.linear(rows, rearrange(gate_up, "e f h -> (e f) h"))
    middle = weighted_swiglu(wide[:, : 2 * width], probs, rows.dtype)
    return F.linear(middle, rearrange(down, "e h f -> (e h) f"))[:, : rows.shape[1]]


def grouped_mm_problems(device: torch.device, dtype: torch.dtype, hidden: int, ffn: int) -> list[str]:
    """Why the kernel cannot run here, in words; empty if it can. `ffn` is this rank's share of F."""
    found = []
    if not hasattr(F, "grouped_mm"):
        found.append(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm; update torch")
    if dtype not in DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES)
        found.append(f"it multiplies {known}, not {str(dtype).removeprefix('torch.')}")
    for name, size in (("hidden", hidden), ("ffn", ffn)):
        if size * dtype.itemsize % STRIDE_BYTES:
            found.append(
                f"rows must be multiples of {STRIDE_BYTES} bytes: {name}={size} x {dtype.itemsize} bytes = "
                f"{size * dtype.itemsize}"
            )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        found.append("it needs a GPU of compute capability 8.0 or later")
    elif device.type not in ("cpu", "cuda", "meta"):
        found.append(f"it runs on cpu and cuda, not {device.type}")
    return found
