"""SwiGLU times the combine weight, forward and backward, each in one pass over the pre-activation.

`a = silu(gate) * up * prob` with gate and up the halves of each row (SwiGLU: Shazeer 2020, arXiv:2002.05202).
The weight multiplies here, before the down projection, so that no expert output need be kept for its
gradient: dprob is an inner product of dH's ingredients, found in the same pass.

A caller that allocated more rows than are filled, because only the device knows how many those are, says so
by `filled`: the kernels then leave the others alone, which saves their share of the memory traffic.
"""

from functools import partial
from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.moe.kernels import direct, eager


def weighted_swiglu(
    gate_up: Float[Tensor, "R F2"], probs: Float[Tensor, "R"] | None, dtype: torch.dtype
) -> Float[Tensor, "R F"]:
    """`silu(gate) * up * prob`, computed in at least fp32 and rounded once, to `dtype`: `swiglu_prob`'s twin.

    The left half of `gate_up` is the gate; without `probs` every row weighs one.
    """
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    if probs is not None:
        product = product * probs.to(wide)[:, None]
    return product.to(dtype)


def swiglu_prob_backward_twin(
    grad: Float[Tensor, "R F"], hidden: Float[Tensor, "R F2"], probs: Float[Tensor, "R"]
) -> tuple[Float[Tensor, "R F2"], Float[Tensor, "R"], Float[Tensor, "R F"]]:
    """`swiglu_prob_backward` in plain PyTorch."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    gate, up = hidden.to(wide).chunk(2, dim=-1)
    upstream, weight = grad.to(wide), probs.to(wide).unsqueeze(-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    weighted = upstream * weight
    d_gate = weighted * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    d_hidden = torch.cat([d_gate, weighted * silu], dim=-1).to(hidden.dtype)
    d_probs = (upstream * silu * up).sum(dim=-1).to(probs.dtype)
    return d_hidden, d_probs, (silu * up * weight).to(hidden.dtype)


def run_swiglu_prob(hidden: Tensor, probs: Tensor, filled: Tensor | None = None) -> Tensor:
    """`swiglu_prob` without a graph. (The twin computes all rows, whatever `filled` says.)"""
    if hidden.is_cuda:
        from isozyme.moe.kernels.triton_swiglu import launch_swiglu_prob

        return launch_swiglu_prob(hidden, probs, filled)
    return weighted_swiglu(hidden, probs, hidden.dtype)


swiglu_prob_op = torch.library.custom_op("isozyme::swiglu_prob", run_swiglu_prob, mutates_args=())


@swiglu_prob_op.register_fake
@no_type_check
def _(hidden: Tensor, probs: Tensor, filled: Tensor | None = None) -> Tensor:
    del probs, filled
    return hidden.new_empty((hidden.shape[0], hidden.shape[1] // 2))


def run_swiglu_prob_backward(
    grad: Tensor, hidden: Tensor, probs: Tensor, filled: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `swiglu_prob`, and its output again (which the down projection's wgrad needs).

    Args:
        grad: `[R, F]`, gradient of the output.
        hidden: `[R, 2F]`, the saved pre-activation.
        probs: `[R]`.
        filled: `[1]`, how many rows there are; None for all R.

    Returns:
        `[R, 2F]` gradient of `hidden`, `[R]` gradient of `probs`, `[R, F]` the recomputed output; each
        unspecified in rows that are not filled.
    """
    if hidden.is_cuda:
        from isozyme.moe.kernels.triton_swiglu import launch_swiglu_prob_backward

        return launch_swiglu_prob_backward(grad, hidden, probs, filled)
    return swiglu_prob_backward_twin(grad, hidden, probs)


swiglu_prob_backward = torch.library.custom_op(
    "isozyme::swiglu_prob_backward", run_swiglu_prob_backward, mutates_args=()
)


@swiglu_prob_backward.register_fake
@no_type_check
def _(
    grad: Tensor, hidden: Tensor, probs: Tensor, filled: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    del filled
    return torch.empty_like(hidden), torch.empty_like(probs), torch.empty_like(grad)


@no_type_check
def _setup(ctx, inputs, output):
    del output
    ctx.save_for_backward(*inputs)


@no_type_check
def _backward(backward, ctx, grad):
    d_hidden, d_probs, _ = backward(grad.contiguous(), *ctx.saved_tensors)
    return d_hidden, d_probs, None


swiglu_prob_op.register_autograd(partial(_backward, swiglu_prob_backward), setup_context=_setup)
_eager_swiglu_prob = eager(run_swiglu_prob, _setup, partial(_backward, run_swiglu_prob_backward))


def swiglu_prob(
    hidden: Float[Tensor, "R F2"], probs: Float[Tensor, "R"], filled: Int[Tensor, "1"] | None = None
) -> Float[Tensor, "R F"]:
    """`silu(gate) * up * prob` for each row, in the dtype of `hidden`.

    Args:
        hidden: the gate half first.
        probs: at least fp32.
        filled: on the device, how many rows there are; None for all R.

    Returns:
        Rows from `filled` on are unspecified, and so are both gradients there: nobody may read them.
    """
    middle: Tensor = direct(swiglu_prob_op, _eager_swiglu_prob)(hidden, probs, filled)
    return middle
