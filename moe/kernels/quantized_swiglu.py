"""SwiGLU times the combine weight with a result quantised row by row, and its gradient with a quantised copy.

What is quantised is the result in the type of the pre-activation, so both are those of
`isozyme.moe.kernels.swiglu` followed by `quantize_rows`, in one pass over memory.
"""

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.moe.kernels.fp8_rows import quantize_rows
from isozyme.moe.kernels.swiglu import swiglu_prob_backward_twin, weighted_swiglu


def quantized_swiglu_twin(
    hidden: Float[Tensor, "R F2"], probs: Float[Tensor, "R"]
) -> tuple[Float[Tensor, "R F"], Float[Tensor, "R"]]:
    """`quantized_swiglu` in two steps, for all rows."""
    return quantize_rows(weighted_swiglu(hidden, probs, hidden.dtype))


def quantized_swiglu_backward_twin(
    grad: Float[Tensor, "R F"], hidden: Float[Tensor, "R F2"], probs: Float[Tensor, "R"]
) -> tuple[
    Float[Tensor, "R F2"],
    Float[Tensor, "R"],
    Float[Tensor, "R F2"],
    Float[Tensor, "R"],
    Float[Tensor, "R F"],
]:
    """`quantized_swiglu_backward` in two steps, for all rows."""
    d_hidden, d_probs, middle = swiglu_prob_backward_twin(grad, hidden, probs)
    return *quantize_rows(d_hidden), d_hidden, d_probs, middle


def run_quantized_swiglu(hidden: Tensor, probs: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up * prob` for each row, quantised.

    Args:
        hidden: `[R, 2F]`, the gate half first.
        probs: `[R]`, at least fp32.
        filled: `[1]`, on the device: how many rows there are.

    Returns:
        `[R, F]` `float8_e4m3fn` codes and `[R]` fp32 scales; rows from `filled` on are unspecified.
    """
    if hidden.is_cuda:
        from isozyme.moe.kernels.triton_quantized_swiglu import launch_quantized_swiglu

        return launch_quantized_swiglu(hidden, probs, filled)
    return quantized_swiglu_twin(hidden, probs)


quantized_swiglu = torch.library.custom_op("isozyme::quantized_swiglu", run_quantized_swiglu, mutates_args=())


@quantized_swiglu.register_fake
@no_type_check
def _(hidden: Tensor, probs: Tensor, filled: Tensor) -> tuple[Tensor, Tensor]:
    del probs, filled
    count, double = hidden.shape
    codes = hidden.new_empty((count, double // 2), dtype=torch.float8_e4m3fn)
    return codes, hidden.new_empty(count, dtype=torch.float32)


def run_quantized_swiglu_backward(
    grad: Tensor, hidden: Tensor, probs: Tensor, filled: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of SwiGLU times the weight, that of `hidden` quantised as well, and its output again.

    Args:
        grad: `[R, F]`, gradient of the output.
        hidden: `[R, 2F]`, the saved pre-activation.
        probs: `[R]`.
        filled: `[1]`, on the device: how many rows there are.

    Returns:
        The gradient of `hidden` as `[R, 2F]` codes, `[R]` scales and `[R, 2F]` in its own type; `[R]`
        gradient of `probs`; `[R, F]` the output. Each is unspecified in rows from `filled` on.
    """
    if hidden.is_cuda:
        from isozyme.moe.kernels.triton_quantized_swiglu import launch_quantized_swiglu_backward

        return launch_quantized_swiglu_backward(grad, hidden, probs, filled)
    return quantized_swiglu_backward_twin(grad, hidden, probs)


quantized_swiglu_backward = torch.library.custom_op(
    "isozyme::quantized_swiglu_backward", run_quantized_swiglu_backward, mutates_args=()
)


@quantized_swiglu_backward.register_fake
@no_type_check
def _(
    grad: Tensor, hidden: Tensor, probs: Tensor, filled: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    del filled
    return (
        torch.empty_like(hidden, dtype=torch.float8_e4m3fn),
        hidden.new_empty(hidden.shape[0], dtype=torch.float32),
        torch.empty_like(hidden),
        torch.empty_like(probs),
        torch.empty_like(grad),
    )
