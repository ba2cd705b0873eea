"""MXFP8 against independent scalar code in exact rational arithmetic, exhaustively where finite."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.mxfp8 import (
    BLOCK,
    E4M3_MAX,
    e8m0_to_float,
    float_to_e8m0,
    quantize_mxfp8,
    round_to_mxfp8,
)

E4M3_VALUES = sorted(
    {
        Fraction(mantissa, 8) * Fraction(2) ** -6
        if exponent == 0
        else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if not (exponent == 15 and mantissa == 7)
    }
)


def scalar_scale_code(amax: float) -> int:
    """The smallest power of two that is not below fp32(amax) * fp32(1/448), as an E8M0 code."""
    if amax == 0:
        return 0
    if math.isinf(amax):
        return 0xFE
    value = torch.tensor(amax, dtype=torch.float32) * torch.tensor(1 / E4M3_MAX, dtype=torch.float32)
    exact, code = Fraction(value.item()), 0
    while code < 254 and Fraction(2) ** (code - 127) < exact:
        code += 1
    return code


def scalar_e4m3(value: Fraction) -> Fraction:
    """Round to the nearest E4M3 value, ties to the even mantissa, saturating."""
    magnitude = min(abs(value), Fraction(448))
    low = max(v for v in E4M3_VALUES if v <= magnitude)
    above = [v for v in E4M3_VALUES if v >= magnitude]
    high = above[0]
    if low == high:
        rounded = low
    elif magnitude - low != high - magnitude:
        rounded = low if magnitude - low < high - magnitude else high
    else:
        rounded = low if E4M3_VALUES.index(low) % 2 == 0 else high
    return rounded if value >= 0 else -rounded


def all_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def test_scale_code_is_exact_for_every_bf16_amax() -> None:
    amax = all_bf16()
    amax = amax[(amax >= 0) & ~torch.isnan(amax)]
    scaled = amax.float() * torch.tensor(1 / E4M3_MAX, dtype=torch.float32)
    codes = float_to_e8m0(scaled)
    powers = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127)
    expected = torch.searchsorted(powers, scaled.double()).clamp(max=254)
    expected[scaled == 0] = 0
    assert torch.equal(codes.long(), expected)


@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 2.0**-120, 447.9, 448.0, 448.1, 1.0, 3.0e38, math.inf])
def test_scale_code_equals_rational_arithmetic(amax: float) -> None:
    block = torch.zeros(1, BLOCK)
    block[0, 7] = amax
    assert int(quantize_mxfp8(block).scales) == scalar_scale_code(amax)


def test_every_e4m3_code_survives_a_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    finite = values[~torch.isnan(values)]
    padded = torch.nn.functional.pad(finite, (0, -len(finite) % BLOCK), value=448.0).reshape(-1, BLOCK)
    padded[:, -1] = 448.0
    assert torch.equal(round_to_mxfp8(padded), padded)


def test_no_finite_value_overflows_its_block() -> None:
    values = all_bf16().float()
    finite = values[torch.isfinite(values)].abs()
    finite = finite[finite > 0]
    blocks = finite[:, None].expand(-1, BLOCK)
    quantized = quantize_mxfp8(blocks)
    assert quantized.codes.float().abs().max() <= E4M3_MAX
    representable = finite < 248 * 2.0**120  # above, rounding to 256 * 2^120 leaves float32
    error = (quantized.dequantize()[:, 0] - finite).abs() / finite
    assert error[representable & (finite > 2.0**-120)].max() <= 2**-4


@given(
    st.lists(st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60), min_size=BLOCK, max_size=BLOCK),
    st.integers(-40, 40),
)
def test_codes_equal_rational_rounding(values: list[float], shift: int) -> None:
    block = torch.tensor([values], dtype=torch.float32) * 2.0**shift
    quantized = quantize_mxfp8(block)
    amax = block.abs().max().item()
    code = scalar_scale_code(amax)
    assert int(quantized.scales) == code
    for value, got in zip(block[0].tolist(), quantized.codes[0].float().tolist(), strict=True):
        assert Fraction(got) == scalar_e4m3(Fraction(value) * Fraction(2) ** (127 - code))


def test_nan_stays_in_its_place_and_infinity_saturates() -> None:
    block = torch.ones(1, BLOCK)
    block[0, 3] = math.nan
    out = round_to_mxfp8(block)
    assert torch.isnan(out[0, 3])
    assert torch.equal(out[0, 4:], torch.ones(BLOCK - 4))
    block[0, 3] = math.inf
    quantized = quantize_mxfp8(block)
    assert int(quantized.scales) == 0xFE
    assert quantized.codes[0, 3].float() == E4M3_MAX


def test_columnwise_is_rowwise_of_the_transpose() -> None:
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    by_column = quantize_mxfp8(x, dim=0)
    by_row = quantize_mxfp8(x.T.contiguous(), dim=1)
    assert by_column.scales.shape == (3, 64)
    assert torch.equal(by_column.codes.float(), by_row.codes.float().T)
    assert torch.equal(by_column.scales, by_row.scales.T)


def test_a_short_last_block_equals_zero_padding() -> None:
    x = torch.randn(44, 8, generator=torch.Generator().manual_seed(1))
    padded = torch.cat([x, torch.zeros(20, 8)])
    assert torch.equal(round_to_mxfp8(x, dim=0), round_to_mxfp8(padded, dim=0)[:44])


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_empty_tensors_quantise_to_empty(shape: tuple[int, int]) -> None:
    assert round_to_mxfp8(torch.zeros(shape)).shape == shape


def test_scale_values_are_powers_of_two_and_nan() -> None:
    values = e8m0_to_float(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    expected = torch.ldexp(torch.ones(255, dtype=torch.float64), torch.arange(255) - 127)
    assert torch.equal(values[:255].double(), expected)
    assert torch.isnan(values[255])
