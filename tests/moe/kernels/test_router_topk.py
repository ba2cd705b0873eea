"""The one-pass router against softmax, a stable sort and autograd."""

import pytest
import torch
from torch import Tensor

from isozyme.moe.kernels.router_topk import (
    count_choices,
    router_topk,
    router_topk_backward_twin,
    router_topk_op,
    router_topk_twin,
)
from isozyme.moe.kernels.triton_router_topk import launch_router_topk, launch_router_topk_backward

SHAPES = [(50, 8, 2), (33, 5, 3), (0, 4, 1), (100, 128, 8), (9, 1, 1), (9, 4, 4)]


def draw(tokens: int, experts: int, device: str) -> Tensor:
    """Random logits with a row of ties and a row with two equal largest."""
    logits = torch.randn(tokens, experts, device=device)
    if tokens > 3:
        logits[1] = logits[1, 0].clone()
        logits[2] = logits[2].round()
    return logits


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_equal_twins(shape: tuple[int, int, int], renormalize: bool, device: str) -> None:
    tokens, experts, topk = shape
    logits = draw(tokens, experts, device)
    valid = torch.rand(tokens, device=device) < 0.8
    windows = next((w for w in (3, 5, 2) if tokens % w == 0), 1)
    got = launch_router_topk(logits, valid, windows, topk, renormalize, 1.5)
    want = router_topk_twin(logits, valid, windows, topk, renormalize, 1.5)
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right)
    grads = (torch.randn_like(want[0]), torch.randn_like(want[2]), torch.randn_like(want[3]))
    torch.testing.assert_close(
        launch_router_topk_backward(*grads, want[0], want[1], renormalize, 1.5),
        router_topk_backward_twin(*grads, want[0], want[1], renormalize, 1.5),
    )


@pytest.mark.parametrize("renormalize", [True, False])
def test_padding_has_no_score_no_weight_and_no_gradient_but_ids(renormalize: bool, device: str) -> None:
    logits = torch.randn(6, 5, device=device)
    valid = torch.tensor([True, False, True, True, False, False], device=device)
    whole = launch_router_topk(logits, torch.ones_like(valid), 2, 2, renormalize, 1.5)
    scores, ids, probs, lse, _ = launch_router_topk(logits, valid, 2, 2, renormalize, 1.5)
    assert torch.equal(ids, whole[1])
    for got, want in ((scores, whole[0]), (probs, whole[2])):
        assert torch.equal(got, torch.where(valid[:, None], want, 0.0))
    grads = [torch.randn_like(each) for each in (scores, probs, lse)]
    arguments = (*grads, scores, ids, renormalize, 1.5)
    for function in (launch_router_topk_backward, router_topk_backward_twin):
        assert (function(*arguments)[~valid] == 0).all()
        assert (function(*arguments)[valid] != 0).any(dim=-1).all()


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_are_those_of_softmax_and_choice(renormalize: bool, device: str) -> None:
    logits = torch.randn(7, 6, dtype=torch.float64, device=device, requires_grad=True)
    everywhere = torch.ones(7, dtype=torch.bool, device=device)

    def differentiable(x: Tensor) -> tuple[Tensor, ...]:
        scores, _, probs, lse, _ = router_topk(x, everywhere, 1, 2, renormalize, 0.7)
        return scores, probs, lse

    assert torch.autograd.gradcheck(differentiable, (logits,))


def test_ties_go_to_the_lower_expert(device: str) -> None:
    everywhere = torch.ones(3, dtype=torch.bool, device=device)
    _, ids, _, _, _ = launch_router_topk(torch.zeros(3, 6, device=device), everywhere, 1, 3, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]] * 3


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_that_are_not_finite_become_nan_and_stay_alone(device: str) -> None:
    logits = draw(6, 8, device)
    everywhere = torch.ones(6, dtype=torch.bool, device=device)
    clean = launch_router_topk(logits, everywhere, 2, 3, True, 1.0)
    logits[3, 5] = torch.nan
    logits[4, 1], logits[5, 7] = torch.inf, -torch.inf
    for function in (launch_router_topk, router_topk_twin):
        scores, ids, probs, lse, _ = function(logits, everywhere, 2, 3, True, 1.0)
        for row in (3, 4, 5):
            assert ids[row].tolist() == [0, 1, 2]
            assert all(torch.isnan(each[row]).all() for each in (scores, probs, lse))
    others = [0, 1, 2]
    assert torch.equal(ids[others], clean[1][others])
    torch.testing.assert_close(probs[others], clean[2][others])


def test_operator_passes_the_library_checks(device: str) -> None:
    logits = torch.randn(6, 8, device=device, requires_grad=True)
    valid = torch.tensor([True, False, True, True, True, False], device=device)
    torch.library.opcheck(router_topk_op, (logits, valid, 2, 2, True, 1.0))


def test_choices_are_counted_by_window_and_padding_is_not(device: str) -> None:
    ids = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]], device=device)
    valid = torch.tensor([True, False, True, True], device=device)
    assert count_choices(ids, valid, 2, 3).tolist() == [[1, 0, 1, 1], [2, 1, 1, 2]]
