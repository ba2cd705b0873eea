"""The row-wise FP8 format: exact codes, scales over the whole range, and what is not finite."""

import pytest
import torch

from isozyme.moe.kernels.fp8_rows import SMALLEST_SCALE, dequantize_rows, quantize_rows


def test_every_code_survives_a_round_trip_at_any_power_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()[codes.float().isfinite()]  # 448 is among them
    for exponent in (-100, -7, 0, 30):
        row = (values * 2.0**exponent)[None]
        found, scales = quantize_rows(row)
        assert scales.item() == 2.0**exponent
        assert torch.equal(dequantize_rows(found, scales), row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_off_by_half_a_step_however_large_its_neighbours_are(dtype: torch.dtype) -> None:
    rows = (torch.randn(40, 64) * torch.logspace(-30, 30, 40)[:, None]).to(dtype)
    codes, scales = quantize_rows(rows)
    off = (dequantize_rows(codes, scales) - rows.float()).abs()
    step = 2.0**-4 * rows.float().abs() + 2.0**-10 * scales[:, None]
    assert (off <= step * (1 + 1e-5)).all()
    assert (codes.float().abs().amax(dim=1) == 448).all()


def test_zeros_and_the_smallest_numbers_neither_divide_by_zero_nor_overflow() -> None:
    codes, scales = quantize_rows(torch.tensor([[0.0, -0.0], [1e-45, -3e-39], [1e-37, 0.0]]))
    assert (scales == SMALLEST_SCALE).all()
    assert codes.float().isfinite().all()
    assert (codes.float()[0] == 0).all()
    torch.testing.assert_close(dequantize_rows(codes, scales)[2, 0].item(), 1e-37, rtol=0.07, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_in_its_row_and_touches_no_other(value: float) -> None:
    x = torch.randn(3, 32)
    alone = dequantize_rows(*quantize_rows(x))
    x[1, 5] = value
    found = dequantize_rows(*quantize_rows(x))
    assert found[1, 5].isnan()
    product = found @ torch.randn(32, 4)
    assert not product[1].isfinite().any()
    assert torch.equal(found[[0, 2]], alone[[0, 2]])
