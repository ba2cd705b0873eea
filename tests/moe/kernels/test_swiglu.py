"""SwiGLU times the combine weight against autograd of its definition."""

import pytest
import torch

from isozyme.moe.kernels.swiglu import (
    swiglu_prob,
    swiglu_prob_backward,
    swiglu_prob_backward_twin,
    swiglu_prob_op,
    weighted_swiglu,
)
from isozyme.moe.kernels.triton_swiglu import launch_swiglu_prob, launch_swiglu_prob_backward

SHAPES = [(13, 70), (0, 16), (1, 1), (5, 2500), (40, 64)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_twins(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    count, ffn = shape
    wide = torch.promote_types(dtype, torch.float32)
    hidden = torch.randn(count, 2 * ffn, dtype=dtype, device=device)
    probs = torch.rand(count, dtype=wide, device=device)
    grad = torch.randn(count, ffn, dtype=dtype, device=device)
    bound = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(
        launch_swiglu_prob(hidden, probs), weighted_swiglu(hidden, probs, hidden.dtype), **bound
    )
    for got, want in zip(
        launch_swiglu_prob_backward(grad, hidden, probs),
        swiglu_prob_backward_twin(grad, hidden, probs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, **bound)


def test_gradients_are_those_of_the_definition(device: str) -> None:
    hidden = torch.randn(6, 10, dtype=torch.float64, device=device, requires_grad=True)
    probs = torch.rand(6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu_prob, (hidden, probs))


def test_backward_returns_the_forward_output_again(device: str) -> None:
    hidden, probs = torch.randn(9, 12, device=device), torch.rand(9, device=device)
    _, _, again = swiglu_prob_backward(torch.randn(9, 6, device=device), hidden, probs)
    torch.testing.assert_close(again, swiglu_prob(hidden, probs))


def test_rows_that_nobody_fills_are_neither_read_nor_written(device: str) -> None:
    """Poisoned inputs leave the filled rows' bits alone; a poisoned result shows that nothing was written."""
    rows, filled, ffn = 7, 4, 2500
    hidden, grad = torch.randn(rows, 2 * ffn, device=device), torch.randn(rows, ffn, device=device)
    probs = torch.rand(rows, device=device)
    limit = torch.tensor([1, filled], dtype=torch.int32, device=device)[-1:]
    want = (
        launch_swiglu_prob(hidden, probs),
        *launch_swiglu_prob_backward(grad, hidden, probs),
    )
    poisoned = [grad.clone(), hidden.clone(), probs.clone()]
    for each in poisoned:
        each[filled:] = float("nan")
    torch.use_deterministic_algorithms(True)  # a fresh allocation is NaN
    try:
        found = (
            launch_swiglu_prob(*poisoned[1:], limit),
            *launch_swiglu_prob_backward(*poisoned, limit),
        )
        # Finite inputs cannot make NaN, so what is NaN was not written.
        untouched = (
            launch_swiglu_prob(hidden, probs, limit),
            *launch_swiglu_prob_backward(grad, hidden, probs, limit),
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for got, expected, fresh in zip(found, want, untouched, strict=True):
        assert torch.equal(got[:filled], expected[:filled])
        assert torch.isnan(fresh[filled:]).all()


def test_operators_pass_the_library_checks(device: str) -> None:
    hidden = torch.randn(6, 10, device=device, requires_grad=True)
    probs = torch.rand(6, device=device, requires_grad=True)
    for filled in (None, torch.tensor([6], dtype=torch.int32, device=device)):
        torch.library.opcheck(swiglu_prob_op, (hidden, probs, filled))
        arguments = (torch.randn(6, 5, device=device), hidden.detach(), probs.detach(), filled)
        torch.library.opcheck(swiglu_prob_backward, arguments)
