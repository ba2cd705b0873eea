"""The reference backend: a Python loop over experts. Runs for every dtype on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isozyme.moe.experts.activation import through_swiglu
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
) -> Float[Tensor, "R H"]:
    """One expert after the other. An empty one multiplies zero rows, so its weights get zero gradients.

    With `recompute` the activation is made a second time in backward, instead of being kept. `linear(x,
    weight)` is both products; another one than torch's may round its operands.
    """
    counts, real = dispatched.counts_on_host(), dispatched.num_rows
    results = [
        through_swiglu(linear(x, w_gate_up), p, x.dtype, partial(linear, weight=w_down), again=recompute)
        for x, p, w_gate_up, w_down in zip(
            rows[:real].split(counts),
            probs[:real].split(counts),
            gate_up.unbind(0),
            down.unbind(0),
            strict=True,
        )
    ]
    return fill_rows(torch.cat(results), rows.shape[0])
