"""The format of row-wise FP8: E4M3 codes, and one fp32 scale for each row of a matrix.

A row's scale is its largest magnitude over 448, the largest E4M3 value: so no value overflows, and rows of
unlike magnitudes do not take each other's precision, as with one scale for all of them. The recipe is that of
torchao's row-wise FP8 training (`torchao.float8`, `torchao.prototype.moe_training`), with scales that are not
rounded to powers of two.

What is not finite stays visible: a NaN makes its row's scale and codes NaN; an infinity makes the scale
infinite and its own code NaN. So the row's products are not finite, where a plain cast would have saturated.
A row of nothing above 448 * 2^-126 has the scale 2^-126: zeros stay zeros, and nothing divides by 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from isozyme.core.mxfp8 import E4M3_MAX

RECIPROCAL_MAX = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32).item()
SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32 number, whose reciprocal is finite."""


def scales_of(amax: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The fp32 scales for the largest magnitudes of rows: multiply codes by them to dequantise."""
    return (amax.float() * RECIPROCAL_MAX).clamp(min=SMALLEST_SCALE)


def encode(x: Float[Tensor, "..."], scales: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """E4M3 codes of `x` for scales that broadcast against it; at most 448 if the scales fit, or NaN."""
    return (x.float() * scales.reciprocal()).to(torch.float8_e4m3fn)


def quantize_rows(x: Float[Tensor, "*N C"]) -> tuple[Float[Tensor, "*N C"], Float[Tensor, "*N"]]:
    """`float8_e4m3fn` codes and fp32 scales of the rows of `x`, in plain PyTorch.

    >>> codes, scales = quantize_rows(torch.tensor([[1.0, -896.0], [0.0, 0.0]]))
    >>> codes.float().tolist(), scales[0].item()
    ([[0.5, -448.0], [0.0, 0.0]], 2.0)
    """
    scales = scales_of(x.detach().abs().amax(dim=-1))
    return encode(x.detach(), scales.unsqueeze(-1)), scales


def dequantize_rows(codes: Float[Tensor, "*N C"], scales: Float[Tensor, "*N"]) -> Float[Tensor, "*N C"]:
    """The represented values, in fp32."""
    return codes.float() * scales.unsqueeze(-1)
