"""The chunked loss against torch's cross-entropy over all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from isozyme.models.loss import cross_entropy_sum


def _case(
    tokens: int, vocab: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 6, dtype=torch.float64, generator=generator).mul_(3).requires_grad_()
    weight = torch.randn(vocab, 6, dtype=torch.float64, generator=generator).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=generator)
    return hidden, weight, labels, torch.rand(tokens, generator=generator) < 0.6


@given(
    tokens=st.integers(1, 20),
    vocab=st.integers(1, 9),
    chunk_elements=st.integers(1, 60),
    seed=st.integers(0, 2**32),
)
def test_loss_equals_torch_in_value_and_gradient_at_every_chunk_size(
    tokens: int, vocab: int, chunk_elements: int, seed: int
) -> None:
    hidden, weight, labels, valid = _case(tokens, vocab, seed)
    labels = labels.masked_fill(~valid, -1_000_000)  # any value where it does not count
    ours = cross_entropy_sum(hidden, weight, labels, valid, chunk_elements=chunk_elements)
    target = labels.masked_fill(~valid, -100)
    theirs = F.cross_entropy(hidden @ weight.T, target, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(ours * 0.37, (hidden, weight)),
        torch.autograd.grad(theirs * 0.37, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_loss_passes_gradcheck() -> None:
    hidden, weight, labels, valid = _case(5, 4, 1)
    assert torch.autograd.gradcheck(
        lambda h, w: cross_entropy_sum(h, w, labels, valid, chunk_elements=8), (hidden, weight)
    )


def test_without_valid_labels_loss_and_gradients_are_zero_on_the_graph_even_for_nan() -> None:
    hidden = torch.full((4, 6), float("nan"), requires_grad=True)
    weight = torch.randn(5, 6, requires_grad=True)
    loss = cross_entropy_sum(
        hidden, weight, torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.bool)
    )
    assert loss.item() == 0.0
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_padding_token_with_nan_spoils_nothing() -> None:
    hidden, weight, labels, valid = _case(6, 5, 2)
    valid[:] = torch.tensor([True, True, True, True, False, False])
    spoilt = hidden.detach().clone()
    spoilt[4:] = float("nan")
    spoilt.requires_grad_()
    clean = cross_entropy_sum(hidden, weight, labels, valid)
    other = cross_entropy_sum(spoilt, weight, labels, valid)
    assert torch.equal(clean, other)
    for one, two in zip(
        torch.autograd.grad(clean, (hidden, weight)),
        torch.autograd.grad(other, (spoilt, weight)),
        strict=True,
    ):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_loss_has_at_least_fp32_and_gradients_the_dtype_of_their_tensor(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    hidden, weight, labels, valid = _case(8, 5, 3)
    small, narrow = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    loss = cross_entropy_sum(small, narrow, labels, valid)
    assert loss.dtype == wide
    grads = torch.autograd.grad(loss, (small, narrow))
    assert [grad.dtype for grad in grads] == [dtype, dtype]


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, labels, valid = _case(8, 5, 4)
    weight.requires_grad_(False)
    cross_entropy_sum(hidden, weight, labels, valid).backward()
    assert weight.grad is None
    assert hidden.grad is not None


def _products(case: tuple[torch.Tensor, ...], chunk_elements: int) -> int:
    """Matrix products of one forward and backward."""

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.products += func.overloadpacket is torch.ops.aten.mm
            return func(*args, **(kwargs or {}))

    with Count() as count:
        cross_entropy_sum(*case, chunk_elements=chunk_elements).backward()
    return count.products


@pytest.mark.parametrize(("chunk_elements", "chunks"), [(40, 1), (39, 2), (20, 2), (15, 3), (5, 8)])
def test_the_logits_of_all_chunks_but_the_last_are_made_twice(chunk_elements: int, chunks: int) -> None:
    assert _products(_case(8, 5, 6), chunk_elements) == chunks + (chunks - 1) + 2 * chunks


@pytest.mark.parametrize("chunk_elements", [1000, 20])
def test_a_second_backward_gives_the_bits_of_the_first(chunk_elements: int) -> None:
    hidden, weight, labels, valid = _case(8, 5, 7)
    loss = cross_entropy_sum(hidden, weight, labels, valid, chunk_elements=chunk_elements)
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)


def test_a_gradient_summed_over_chunks_is_rounded_once() -> None:
    """300 equal terms of 1 would stop growing at 256 in bf16."""
    tokens = 300
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.tensor([[0.0], [-torch.inf]], dtype=torch.bfloat16).requires_grad_()
    labels, valid = torch.ones(tokens, dtype=torch.long), torch.ones(tokens, dtype=torch.bool)
    cross_entropy_sum(hidden, weight, labels, valid, chunk_elements=2).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [tokens, -tokens]


def test_autocast_rounds_the_logits_and_leaves_gradients_their_types() -> None:
    hidden, weight, labels, valid = _case(8, 5, 8)
    small, head = (x.detach().float().requires_grad_() for x in (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy_sum(small, head, labels, valid)
    loss.backward()
    assert small.grad is not None
    assert head.grad is not None
    want = torch.autograd.grad(cross_entropy_sum(hidden, weight, labels, valid), (hidden, weight))
    for got, expected in zip((small.grad, head.grad), want, strict=True):
        assert (got - expected).norm() / expected.norm() < 0.05


def test_no_tokens_give_zero() -> None:
    weight = torch.randn(5, 6)
    nothing = torch.zeros(0, dtype=torch.long)
    assert cross_entropy_sum(torch.zeros(0, 6), weight, nothing, nothing.bool()).item() == 0.0
