"""The activation between an expert's two products: SwiGLU times the row's combine weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isozyme.parallel.recompute import recompute, remade


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
