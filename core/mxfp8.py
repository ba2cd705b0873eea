"""The MXFP8 format in plain PyTorch: blocks of 32 values in E4M3 that share one power-of-two scale (E8M0).

It reproduces, bit for bit, what Transformer Engine's quantiser writes, so that MXFP8 training can be studied
on any machine. Format: OCP Microscaling Formats (MX) specification 1.0, 2023. The rounding of the scale
(up, from amax/448, so that no value overflows) is Transformer Engine's, not the specification's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

BLOCK = 32
"""Values that share one scale."""
E4M3_MAX = 448.0
"""The largest finite E4M3 value."""

_RECIPROCAL_MAX = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32).item()


@dataclass(frozen=True)
class MXFP8:
    """A quantised tensor: E4M3 codes in the shape of the source, and one scale for each block along `dim`."""

    codes: Float[Tensor, "..."]
    """`torch.float8_e4m3fn`, the shape of the source."""
    scales: UInt8[Tensor, "..."]
    """E8M0 codes; the shape of the source with `dim` divided by 32, rounded up. 2^(code-127); 255 is NaN."""
    dim: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The represented values (exact in float32)."""
        length = self.codes.shape[self.dim]
        scale = e8m0_to_float(self.scales).repeat_interleave(BLOCK, dim=self.dim).narrow(self.dim, 0, length)
        return (self.codes.float() * scale).to(dtype)


def float_to_e8m0(value: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """The E8M0 code of non-negative float32 values: the exponent, rounded up.

    0 gives code 0, infinity the largest finite scale (0xFE), NaN the NaN code (0xFF). Values up to 2^-127
    give code 0, the smallest scale.
    """
    bits = value.contiguous().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    tiny = (exponent == 0) & (mantissa <= 0x400000)
    code = exponent + ((mantissa > 0) & (exponent != 254) & ~tiny).int()
    code = torch.where(torch.isinf(value), 0xFE, code)
    return torch.where(torch.isnan(value), 0xFF, code).to(torch.uint8)


def e8m0_to_float(code: UInt8[Tensor, "..."]) -> Float[Tensor, "..."]:
    """2^(code-127) in float32 (code 0 is the subnormal 2^-127), and NaN for 255."""
    wide = code.int()
    bits = torch.where(wide == 0, 0x400000, wide << 23)
    return torch.where(wide == 255, torch.nan, bits.view(torch.float32))


def quantize_mxfp8(x: Float[Tensor, "..."], dim: int = -1) -> MXFP8:
    """Quantise in blocks of 32 along `dim`; a last, shorter block counts as padded with zeros.

    Each GEMM operand is quantised along its contraction dim, from the high-precision source: row-wise
    (1x32, `dim=-1`) and column-wise (32x1, `dim=-2`) copies are separate quantisations.

    NaN values stay NaN and do not raise the block's scale; infinities saturate to the largest value.

    >>> q = quantize_mxfp8(torch.tensor([[1.0] * 31 + [1000.0]]))
    >>> int(q.scales), q.dequantize()[0, -1].item(), q.dequantize()[0, 0].item()
    (129, 1024.0, 1.0)
    """
    dim = dim % x.ndim
    source = x.detach().to(torch.float32).movedim(dim, -1)
    length = source.shape[-1]
    blocks = -(-length // BLOCK)
    padded = torch.nn.functional.pad(source, (0, blocks * BLOCK - length)).unflatten(-1, (blocks, BLOCK))
    magnitude = torch.where(torch.isnan(padded), 0.0, padded.abs())
    amax = magnitude.amax(dim=-1) if magnitude.numel() else magnitude.new_zeros(magnitude.shape[:-1])
    scales = float_to_e8m0(amax * _RECIPROCAL_MAX)
    inverse = e8m0_to_float((254 - scales.int()).clamp(min=0).to(torch.uint8))
    scaled = (padded * inverse.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.flatten(-2).narrow(-1, 0, length).to(torch.float8_e4m3fn)
    return MXFP8(codes.movedim(-1, dim), scales.movedim(-1, dim), dim)


def round_to_mxfp8(x: Float[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    """What a GEMM sees of `x` quantised along `dim`: quantised and dequantised, in at least float32."""
    return quantize_mxfp8(x, dim).dequantize(torch.promote_types(x.dtype, torch.float32))
