"""The two-way MXFP8 kernel against the format's definition, bit for bit."""

import pytest
import torch
from torch import Tensor

from isozyme.moe.kernels.mxfp8 import mxfp8_quantize_both, mxfp8_quantize_both_twin
from isozyme.moe.kernels.triton_mxfp8 import launch_mxfp8_quantize_both

SHAPES = [(64, 128), (33, 70), (1, 32), (0, 32), (100, 300)]


def same_bits(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_equals_twin_on_values_that_need_no_rounding(shape: tuple[int, int], device: str) -> None:
    """The interpreter rounds to E4M3 wrongly where the mantissa carries; exact values test all the rest."""
    mantissa = torch.randint(8, 16, shape, device=device).float()
    x = mantissa * torch.exp2(torch.randint(-2, 3, shape, device=device).float())
    x *= torch.where(torch.rand(shape, device=device) < 0.5, -1.0, 1.0)
    x[torch.rand(shape, device=device) < 0.1] = 0.0
    same_bits(launch_mxfp8_quantize_both(x), mxfp8_quantize_both_twin(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_scales_equal_over_the_whole_range(shape: tuple[int, int], device: str) -> None:
    x = (
        torch.randn(shape, device=device)
        * torch.logspace(-30, 30, max(shape[0], 1), device=device)[: shape[0], None]
    )
    got, want = launch_mxfp8_quantize_both(x), mxfp8_quantize_both_twin(x)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[3], want[3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_equal_bit_for_bit_on_the_gpu(dtype: torch.dtype) -> None:
    x = torch.randn(1000, 300, device="cuda") * torch.logspace(-30, 30, 1000, device="cuda")[:, None]
    x[3, 5], x[10, 3] = torch.nan, torch.inf
    x[4, :32] = 0
    same_bits(launch_mxfp8_quantize_both(x.to(dtype)), mxfp8_quantize_both_twin(x.to(dtype)))


def test_operator_passes_the_library_checks(device: str) -> None:
    torch.library.opcheck(mxfp8_quantize_both, (torch.randn(40, 64, device=device),))
