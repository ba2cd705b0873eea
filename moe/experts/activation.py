"""The activation between an expert's two products: SwiGLU times the row's combine weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.moe.kernels.swiglu import weighted_swiglu
from isozyme.parallel.recompute import recompute, remade


def through_swiglu(
    gate_up: Float[Tensor, "R F2"],
    probs: Float[Tensor, "R"] | None,
    dtype: torch.dtype,
    down: Callable[[Float[Tensor, "R F"]], Tensor],
    *,
    again: bool,
) -> Tensor:
    """`down(weighted_swiglu(gate_up, probs, dtype))`.

    Args:
        gate_up: the pre-activation.
        probs: combine weights.
        dtype: of the activation.
        down: the second product, which keeps its input for the gradient of its weight.
        again: keep nothing but `gate_up` and `probs` for backward, and make the activation (not the product)
            a second time there. Otherwise autograd keeps the activation and up to four tensors of its size,
            in at least fp32.
    """
    if not again or not torch.is_grad_enabled():
        return down(weighted_swiglu(gate_up, probs, dtype))
    given = (gate_up,) if probs is None else (gate_up, probs)

    def activation(wide: Tensor, weights: Tensor | None = None) -> Tensor:
        return weighted_swiglu(wide, weights, dtype)

    (middle,) = recompute(lambda *each: (activation(*each),), given)
    with remade(middle, activation, *given):
        return down(middle)
