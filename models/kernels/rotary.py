"""Rotating channel pairs in one pass: read a head's row once, write it once.

The gradient is the rotation by the negative angle, so one kernel serves both directions.
"""

from functools import partial
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.moe.kernels import direct, eager


def rotate_pairs_twin(
    x: Float[Tensor, "B S N D"], cos: Float[Tensor, "B S D2"], sin: Float[Tensor, "B S D2"], inverse: bool
) -> Float[Tensor, "B S N D"]:
    """`rotate_pairs` in plain PyTorch, computed in the dtype of the angles and rounded once."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    c, s = cos[:, :, None], -sin[:, :, None] if inverse else sin[:, :, None]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


def run_rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """`rotate_pairs` without a graph."""
    if x.is_cuda:
        from isozyme.models.kernels.triton_rotary import launch_rotate_pairs

        return launch_rotate_pairs(x, cos, sin, inverse)
    return rotate_pairs_twin(x, cos, sin, inverse)


rotate_pairs_op = torch.library.custom_op("isozyme::rotate_pairs", run_rotate_pairs, mutates_args=())


@rotate_pairs_op.register_fake
@no_type_check
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    del cos, sin, inverse
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@no_type_check
def _setup(ctx, inputs, output):
    del output
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


@no_type_check
def _backward(turn, ctx, grad):
    cos, sin = ctx.saved_tensors
    return turn(grad.contiguous(), cos, sin, not ctx.inverse), None, None, None


rotate_pairs_op.register_autograd(partial(_backward, rotate_pairs_op), setup_context=_setup)
_eager_rotate_pairs = eager(run_rotate_pairs, _setup, partial(_backward, run_rotate_pairs))


def rotate_pairs(
    x: Float[Tensor, "B S N D"], cos: Float[Tensor, "B S D2"], sin: Float[Tensor, "B S D2"], inverse: bool
) -> Float[Tensor, "B S N D"]:
    """Turn channel i and channel i + D/2 of every head by the token's i-th angle.

    Args:
        x: the heads.
        cos: at least fp32, without gradient.
        sin: likewise.
        inverse: turn by the negative angle.

    Returns:
        Contiguous, in the dtype of `x`.
    """
    turned: Tensor = direct(rotate_pairs_op, _eager_rotate_pairs)(x, cos, sin, inverse)
    return turned
