"""Rotating channel pairs in one pass: read a head's row once, write it once.

The gradient is the rotation by the negative angle, so one kernel serves both directions.
"""

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor


def rotate_pairs_twin(
    x: Float[Tensor, "B S N D"], cos: Float[Tensor, "B S D2"], sin: Float[Tensor, "B S D2"], inverse: bool
) -> Float[Tensor, "B S N D"]:
    """`rotate_pairs` in plain PyTorch, computed in the dtype of the angles and rounded once."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    c, s = cos[:, :, None], -sin[:, :, None] if inverse else sin[:, :, None]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)


@torch.library.custom_op("isozyme::rotate_pairs", mutates_args=())
def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Turn channel i and channel i + D/2 of every head by the token's i-th angle.

    Args:
        x: `[B, S, N, D]`.
        cos: `[B, S, D/2]`, at least fp32, without gradient.
        sin: likewise.
        inverse: turn by the negative angle.

    Returns:
        `[B, S, N, D]` in the dtype of `x`.
    """
    if x.is_cuda:
        from isozyme.models.kernels.triton_rotary import launch_rotate_pairs

        return launch_rotate_pairs(x, cos, sin, inverse)
    return rotate_pairs_twin(x, cos, sin, inverse)


@rotate_pairs.register_fake
@no_type_check
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    del cos, sin, inverse
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    del output
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    cos, sin = ctx.saved_tensors
    return rotate_pairs(grad.contiguous(), cos, sin, not ctx.inverse), None, None, None


rotate_pairs.register_autograd(_backward, setup_context=_setup)
