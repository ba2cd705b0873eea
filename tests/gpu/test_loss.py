"""The head's cross-entropy with its kernels, in bf16: against fp64, and its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isozyme.models.loss import CHUNK_ELEMENTS, cross_entropy_sum

pytestmark = pytest.mark.gpu


def draw(tokens: int, vocab: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(2)
    hidden = torch.randn(tokens, width, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(vocab, width, device="cuda", generator=generator) / width**0.5).bfloat16()
    labels = torch.randint(vocab, (tokens,), device="cuda", generator=generator)
    valid = torch.rand(tokens, device="cuda", generator=generator) < 0.8
    return hidden.requires_grad_(), weight.requires_grad_(), labels, valid


@pytest.mark.parametrize("chunk_elements", [CHUNK_ELEMENTS, 2**22])
@pytest.mark.parametrize(("tokens", "vocab"), [(1000, 32000), (1000, 50257), (5000, 12)])
def test_value_and_gradients_follow_fp64(tokens: int, vocab: int, chunk_elements: int) -> None:
    hidden, weight, labels, valid = draw(tokens, vocab, 256)
    labels = labels.masked_fill(~valid, -1_000_000)
    loss = cross_entropy_sum(hidden, weight, labels, valid, chunk_elements=chunk_elements)
    found = torch.autograd.grad(loss * 0.001, (hidden, weight))
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    target = labels.masked_fill(~valid, -100)
    want = F.cross_entropy(wide[0] @ wide[1].T, target, ignore_index=-100, reduction="sum")
    assert loss.dtype == torch.float32
    assert abs(loss.item() / want.item() - 1) < 1e-4
    for got, expected in zip(found, torch.autograd.grad(want * 0.001, wide), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - expected).norm() / expected.norm() < 0.01
    assert not found[0][~valid].any()


@pytest.mark.parametrize(("tokens", "vocab"), [(16_384, 8192), (131_072, 512), (131_072, 8192)])
def test_memory_is_that_of_one_chunk_of_logits_in_the_models_type(tokens: int, vocab: int) -> None:
    hidden, weight, labels, valid = draw(tokens, vocab, 64)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cross_entropy_sum(hidden, weight, labels, valid).backward()
    peak = torch.cuda.max_memory_allocated() - before
    logits = 2 * min(CHUNK_ELEMENTS, tokens * vocab)
    gradients = 2 * (hidden.numel() + weight.numel())
    by_token = 64 * tokens  # softmax parts, labels, masks
    workspace = 64 * 2**20  # of the matrix products
    assert peak < logits + 2 * gradients + 4 * weight.numel() + by_token + workspace
