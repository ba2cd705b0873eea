"""The kernels that write row-wise FP8, each against its twin.

Triton's interpreter rounds to E4M3 wrongly where the mantissa carries, and has no NaN there. So it sees
values that need no rounding, or only codes whose mantissa did not carry are compared; on a GPU all are.
"""

import pytest
import torch
from torch import Tensor

from isozyme.moe.kernels.fp8_rows import dequantize_rows
from isozyme.moe.kernels.quantized_scatter import scatter_quantized, scatter_quantized_twin
from isozyme.moe.kernels.quantized_swiglu import (
    quantized_swiglu,
    quantized_swiglu_backward,
    quantized_swiglu_backward_twin,
    quantized_swiglu_twin,
)
from isozyme.moe.kernels.quantized_weights import (
    quantize_transposed,
    quantize_transposed_twin,
    quantize_weights,
    quantize_weights_twin,
)
from isozyme.moe.kernels.row_map import row_map
from isozyme.moe.kernels.scaled_grouped_mm import scaled_grouped_mm, scaled_grouped_mm_twin
from isozyme.moe.kernels.triton_quantized_scatter import launch_scatter_quantized
from isozyme.moe.kernels.triton_quantized_swiglu import (
    launch_quantized_swiglu,
    launch_quantized_swiglu_backward,
)
from isozyme.moe.kernels.triton_quantized_weights import launch_quantize_transposed, launch_quantize_weights


def exact(shape: tuple[int, ...], device: str) -> Tensor:
    """Values that need no rounding, whichever rows and columns share a scale; some rows are zero."""
    mantissa = torch.randint(8, 15, shape, device=device).float()
    x = mantissa * torch.exp2(torch.randint(-1, 3, shape, device=device).float())
    x *= torch.where(torch.rand(shape, device=device) < 0.5, -1.0, 1.0)
    x[torch.rand(shape, device=device) < 0.1] = 0.0
    if shape[-1] and shape[-2]:
        x[..., torch.rand(shape[-2], device=device) < 0.2, :] = 0.0
        x[..., :, 0] = x[..., 0, :] = 448.0  # so that every scale is a power of two: 1
    return x


def same(found: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, want, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0, equal_nan=True)


def near(codes: Tensor, scales: Tensor, want_codes: Tensor, want_scales: Tensor) -> None:
    """Equal up to one step of E4M3, where sums of another order may round another way."""
    torch.testing.assert_close(scales, want_scales, rtol=1e-2, atol=0)
    carried = (want_codes.view(torch.uint8) & 7) == 0 if not codes.is_cuda else torch.zeros_like(codes).bool()
    found, want = dequantize_rows(codes, scales), dequantize_rows(want_codes, want_scales)
    off = (found - want).abs()
    if not len(found):
        return
    assert ((off <= 0.14 * want.abs() + 2.0**-8 * want_scales[:, None]) | carried).all()
    assert (off[~carried] > 0.02 * want.abs()[~carried] + 2.0**-9).float().mean() < 0.02


def slots(tokens: int, device: str) -> tuple[Tensor, int]:
    ids = torch.rand(tokens, 4, device=device).topk(2, dim=1).indices
    kept = torch.rand(tokens, 2, device=device) < 0.8
    slot_row, counts, _ = row_map(ids, kept, 4, 1)
    return slot_row, int(counts.sum())


@pytest.mark.parametrize("shape", [(13, 48), (1, 16), (5, 2100), (0, 32)])
@pytest.mark.parametrize("keep", [False, True])
def test_scattered_rows_codes_scales_and_weights_equal_the_twins(
    shape: tuple[int, int], keep: bool, device: str
) -> None:
    tokens = exact(shape, device)
    slot_row, filled = slots(shape[0], device)
    probs = None if keep else torch.rand(shape[0], 2, device=device)
    found = launch_scatter_quantized(tokens, probs, slot_row, filled + 3, keep)
    want = scatter_quantized_twin(tokens, probs, slot_row, filled + 3, keep)
    same(tuple(x[:filled] for x in found), tuple(x[:filled] for x in want))
    assert [x.shape for x in found] == [x.shape for x in want]


def test_a_scattered_row_that_is_not_finite_says_so_and_one_of_zeros_is_zero(device: str) -> None:
    tokens = exact((6, 32), device)
    tokens[1, 3], tokens[4, 0], tokens[2] = torch.nan, -torch.inf, 0.0
    slot_row, filled = torch.arange(6, dtype=torch.int32, device=device)[:, None], 6
    found = launch_scatter_quantized(tokens, None, slot_row, filled, False)
    want = scatter_quantized_twin(tokens, None, slot_row, filled, False)
    same(found[1:2], want[1:2])
    if device == "cuda":
        same(found[:1], want[:1])
    rows = dequantize_rows(found[0], found[1])
    whole = rows.sum(dim=1).isfinite()
    assert (rows[2] == 0).all()
    assert whole.tolist() == [True, False, True, True, False, True]


@pytest.mark.parametrize("shape", [(9, 48), (3, 1100), (0, 16)])
def test_activation_and_gradient_are_quantised_row_by_row(shape: tuple[int, int], device: str) -> None:
    """Up to a row's rounding; rows that nobody fills are neither read nor written."""
    rows, ffn = shape
    filled = max(rows - 2, 0)
    hidden = (
        torch.randn(rows, 2 * ffn, device=device)
        * torch.logspace(-1, 1, max(rows, 1), device=device)[:rows, None]
    )
    probs, grad = torch.rand(rows, device=device), torch.randn(rows, ffn, device=device)
    limit = torch.tensor([1, filled], dtype=torch.int32, device=device)[-1:]
    want = quantized_swiglu_twin(hidden, probs)
    want_back = quantized_swiglu_backward_twin(grad, hidden, probs)
    hidden[filled:], grad[filled:] = torch.nan, torch.nan
    codes, scales = launch_quantized_swiglu(hidden, probs, limit)
    near(codes[:filled], scales[:filled], want[0][:filled], want[1][:filled])
    codes, scales, *plain = launch_quantized_swiglu_backward(grad, hidden, probs, limit)
    near(codes[:filled], scales[:filled], want_back[0][:filled], want_back[1][:filled])
    for one, other in zip(plain, want_back[2:], strict=True):
        torch.testing.assert_close(one[:filled], other[:filled], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 48, 80), (1, 144, 16), (3, 16, 1040)])
def test_weights_are_quantised_by_row_and_transposed_by_column(
    shape: tuple[int, int, int], device: str
) -> None:
    weights = exact(shape, device)
    found = launch_quantize_weights(weights)
    same(found, quantize_weights_twin(weights))
    same(launch_quantize_transposed(weights, found[2]), quantize_transposed_twin(weights, found[2]))


def test_a_weight_that_is_not_finite_reaches_its_row_and_its_column_alone(device: str) -> None:
    weights = exact((2, 32, 48), device)
    weights[1, 3, 5] = torch.nan
    codes, scales, maxima = launch_quantize_weights(weights)
    rows = dequantize_rows(codes, scales).sum(dim=-1)
    columns = dequantize_rows(*launch_quantize_transposed(weights, maxima)).sum(dim=-1)
    assert (~rows.isfinite()).nonzero().tolist() == [[1, 3]]
    assert (~columns.isfinite()).nonzero().tolist() == [[1, 5]]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 4096, 14_336])
def test_codes_equal_bit_for_bit_on_the_gpu(width: int) -> None:
    x = torch.randn(300, width, device="cuda") * torch.logspace(-30, 30, 300, device="cuda")[:, None]
    x = x.bfloat16()
    x[3, 5], x[4] = torch.nan, 0
    slot_row, filled = slots(300, "cuda")
    same(
        tuple(t[:filled] for t in launch_scatter_quantized(x, None, slot_row, 600, True)),
        tuple(t[:filled] for t in scatter_quantized_twin(x, None, slot_row, 600, True)),
    )
    weights = torch.randn(3, 208, width, device="cuda").bfloat16()
    found = launch_quantize_weights(weights)
    same(found, quantize_weights_twin(weights))
    same(launch_quantize_transposed(weights, found[2]), quantize_transposed_twin(weights, found[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("ffn", [768, 14_336])
def test_the_quantised_activation_in_bf16_on_the_gpu(ffn: int) -> None:
    hidden = torch.randn(64, 2 * ffn, device="cuda").bfloat16()
    grad, probs = torch.randn(64, ffn, device="cuda").bfloat16(), torch.rand(64, device="cuda")
    filled = torch.tensor([64], dtype=torch.int32, device="cuda")
    near(*launch_quantized_swiglu(hidden, probs, filled), *quantized_swiglu_twin(hidden, probs))
    found = launch_quantized_swiglu_backward(grad, hidden, probs, filled)
    want = quantized_swiglu_backward_twin(grad, hidden, probs)
    near(*found[:2], *want[:2])
    for one, other in zip(found[2:], want[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[100, 0, 1, 155], [0, 0, 256, 0], [64, 64, 64, 64]])
def test_the_scaled_product_equals_its_twin_on_hopper(counts: list[int]) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch's scaled grouped product is built for Hopper")
    rows = torch.randn(300, 256, device="cuda") * torch.logspace(-3, 3, 300, device="cuda")[:, None]
    weights = torch.randn(4, 384, 256, device="cuda")
    codes, scales, *_ = launch_quantize_weights(weights)
    slot_row = torch.arange(300, dtype=torch.int32, device="cuda")[:, None]
    left = launch_scatter_quantized(rows, None, slot_row, 300, False)[:2]
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    given = (*left, codes, scales, ends)
    found = scaled_grouped_mm(*given, torch.bfloat16)[:256].float().cpu()
    want = scaled_grouped_mm_twin(*(each.cpu() for each in given), torch.bfloat16)[:256].float()
    assert ((found - want).norm(dim=1) / want.norm(dim=1)).max() < 0.01


def test_operators_pass_the_library_checks(device: str) -> None:
    hidden, probs = torch.randn(6, 32, device=device), torch.rand(6, device=device)
    filled = torch.tensor([6], dtype=torch.int32, device=device)
    slot_row, rows = slots(6, device)
    weights = torch.randn(2, 16, 32, device=device)
    for operator, given in (
        (scatter_quantized, (hidden, probs[:, None].repeat(1, 2), slot_row, rows, True)),
        (scatter_quantized, (hidden, None, slot_row, rows, False)),
        (quantized_swiglu, (hidden, probs, filled)),
        (quantized_swiglu_backward, (hidden[:, :16].contiguous(), hidden, probs, filled)),
        (quantize_weights, (weights,)),
        (quantize_transposed, (weights, weights.abs().amax(dim=1))),
    ):
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
    if device == "cpu":
        codes, scales, _ = quantize_weights(weights)
        left = scatter_quantized(hidden, None, slot_row, rows, False)[:2]
        ends = torch.tensor([rows, rows], dtype=torch.int32)
        given = (*left, codes, scales, ends, torch.bfloat16)
        torch.library.opcheck(scaled_grouped_mm, given, test_utils="test_faketensor")
