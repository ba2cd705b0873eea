"""The reference backend: a Python loop over experts. Runs for every dtype on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isozyme.moe.experts.activation import through_swiglu
from isozyme.moe.experts.delayed import DelayedGradients
from isozyme.moe.types import Dispatched


def fill_rows(rows: Float[Tensor, "N H"], total: int) -> Float[Tensor, "R H"]:
    """`rows` with zero rows behind them, `total` in all; the gradient of those is not read."""
    return rows if rows.shape[0] == total else F.pad(rows, (0, 0, 0, total - rows.shape[0]))


def loop_experts(
    rows: Float[Tensor, "R H"],
    probs: Float[Tensor, "R"],
    gate_up: Float[Tensor, "E_local F2 H"],
    down: Float[Tensor, "E_local H F"],
    dispatched: Dispatched,
    *,
    recompute: bool = False,
    linear: Callable[..., Tensor] = F.linear,
    delayed: DelayedGradients | None = None,
) -> Float[Tensor, "R H"]:
    """One expert after the other. An empty one multiplies zero rows, so its weights get zero gradients.

    With `recompute` the activation is made a second time in backward, instead of being kept. `linear(x,
    weight)` is both products; another one than torch's may round its operands. With `delayed` they are
    torch's, and backward leaves the weights' gradients there.
    """
    counts, real = dispatched.counts_on_host(), dispatched.num_rows
    product = partial(_product, linear, delayed)
    results = [
        through_swiglu(
            product(x, w_gate_up, stack=0, expert=expert),
            p,
            x.dtype,
            partial(product, weight=w_down, stack=1, expert=expert),
            again=recompute,
        )
        for expert, (x, p, w_gate_up, w_down) in enumerate(
            zip(
                rows[:real].split(counts),
                probs[:real].split(counts),
                gate_up.unbind(0),
                down.unbind(0),
                strict=True,
            )
        )
    ]
    return fill_rows(torch.cat(results), rows.shape[0])


def _product(
    linear: Callable[..., Tensor],
    delayed: DelayedGradients | None,
    x: Tensor,
    weight: Tensor,
    *,
    stack: int,
    expert: int,
) -> Tensor:
    if delayed is None:
        return linear(x, weight)
    late: Tensor = _DelayedLinear.apply(x, weight, delayed, stack, expert)  # type: ignore[no-untyped-call]
    return late


class _DelayedLinear(torch.autograd.Function):
    """`F.linear`, whose backward leaves the weight's gradient for later."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, delayed: DelayedGradients, stack: int, expert: int
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.delayed, ctx.stack, ctx.expert = delayed, stack, expert
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        ctx.delayed.leave(ctx.stack, lambda: grad.T @ x, expert=ctx.expert)
        return grad @ weight, None, None, None, None
