"""The reference backend: a Python loop over experts. Runs for every dtype on every device."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isozyme.moe.types import Dispatched


def weighted_swiglu(
    gate_up: Float[Tensor, "R F2"], probs: Float[Tensor, "R"] | None, dtype: torch.dtype
) -> Float[Tensor, "R F"]:
    """`silu(gate) * up * prob`, computed in at least fp32 and rounded once, to `dtype`.

    The left half of `gate_up` is the gate; without `probs` every row weighs one. SwiGLU: Shazeer, "GLU
    variants improve transformer", 2020 (arXiv 2002.05202).
    """
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    product = F.silu(gate) * up
    if probs is not None:
        product = product * probs.to(wide)[:, None]
    return product.to(dtype)


def fill_rows(rows: Float[Tensor, "N H"], total: int) -> Float[Tensor, "R H"]:
    """`rows` with zero rows behind them, `total` in all; the gradient of those is not read."""
    return rows if rows.shape[0] == total else F.pad(rows, (0, 0, 0, total - rows.shape[0]))


def loop_experts(
    rows: Float[Tensor, "R H"],
    probs: Float[Tensor, "R"],
    gate_up: Float[Tensor, "E_local F2 H"],
    down: Float[Tensor, "E_local H F"],
    dispatched: Dispatched,
) -> Float[Tensor, "R H"]:
    """One expert after the other. An empty one multiplies zero rows, so its weights get zero gradients."""
    counts, real = dispatched.counts_on_host(), dispatched.num_rows
    results = [
        F.linear(weighted_swiglu(F.linear(x, w_gate_up), p, x.dtype), w_down)
        for x, p, w_gate_up, w_down in zip(
            rows[:real].split(counts),
            probs[:real].split(counts),
            gate_up.unbind(0),
            down.unbind(0),
            strict=True,
        )
    ]
    return fill_rows(torch.cat(results), rows.shape[0])
