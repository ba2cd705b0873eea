"""The 8-bit copies of a stack of weights: by rows for the forward product, transposed for the backward one.

A product scales each column of its right operand once, over the contraction dim: that is a row of the weight
`[out, in]` in forward, and a column in backward, where the operand is wanted transposed. The first pass also
finds the columns' maxima, so each copy costs one read of the stack: six bytes an element for both.
"""

from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.moe.kernels.fp8_rows import encode, quantize_rows, scales_of


def quantize_weights_twin(
    weights: Float[Tensor, "E O I"],
) -> tuple[Float[Tensor, "E O I"], Float[Tensor, "E O"], Float[Tensor, "E I"]]:
    """`quantize_weights` in two passes."""
    return *quantize_rows(weights), weights.detach().abs().amax(dim=1).float()


def quantize_transposed_twin(
    weights: Float[Tensor, "E O I"], maxima: Float[Tensor, "E I"]
) -> tuple[Float[Tensor, "E I O"], Float[Tensor, "E I"]]:
    """`quantize_transposed` in two passes."""
    scales = scales_of(maxima)
    return encode(weights.detach(), scales.unsqueeze(1)).mT.contiguous(), scales


def run_quantize_weights(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise each row of a stack `[E, O, I]`.

    Returns:
        `[E, O, I]` `float8_e4m3fn` codes, `[E, O]` fp32 scales, and the columns' largest magnitudes `[E, I]`
        in fp32, which `quantize_transposed` takes.
    """
    if weights.is_cuda:
        from isozyme.moe.kernels.triton_quantized_weights import launch_quantize_weights

        return launch_quantize_weights(weights)
    return quantize_weights_twin(weights)


quantize_weights = torch.library.custom_op("isozyme::quantize_weights", run_quantize_weights, mutates_args=())


@quantize_weights.register_fake
@no_type_check
def _(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    experts, outputs, inputs = weights.shape
    return (
        weights.new_empty(weights.shape, dtype=torch.float8_e4m3fn),
        weights.new_empty((experts, outputs), dtype=torch.float32),
        weights.new_empty((experts, inputs), dtype=torch.float32),
    )


def run_quantize_transposed(weights: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each column of a stack `[E, O, I]`, and transpose it.

    Args:
        weights: the stack.
        maxima: `[E, I]`, from `quantize_weights` of the same stack.

    Returns:
        `[E, I, O]` `float8_e4m3fn` codes and `[E, I]` fp32 scales.
    """
    if weights.is_cuda:
        from isozyme.moe.kernels.triton_quantized_weights import launch_quantize_transposed

        return launch_quantize_transposed(weights, maxima)
    return quantize_transposed_twin(weights, maxima)


quantize_transposed = torch.library.custom_op(
    "isozyme::quantize_transposed", run_quantize_transposed, mutates_args=()
)


@quantize_transposed.register_fake
@no_type_check
def _(weights: Tensor, maxima: Tensor) -> tuple[Tensor, Tensor]:
    experts, outputs, inputs = weights.shape
    return (
        weights.new_empty((experts, inputs, outputs), dtype=torch.float8_e4m3fn),
        torch.empty_like(maxima),
    )
