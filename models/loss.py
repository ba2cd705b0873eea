"""Cross-entropy of a linear head, summed over valid labels, without ever holding all logits.

Tokens are taken in chunks; a chunk's logits are computed, used and forgotten, and computed again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**24
"""Logits held at once: 64 MiB in fp32."""


def cross_entropy_sum(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "V H"],
    labels: Int[Tensor, "T"],
    valid: Bool[Tensor, "T"],
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Float[Tensor, ""]:
    """The sum over valid labels of `logsumexp(logits) - logits[label]`, in nats.

    Logits are rounded to the dtype of `hidden` by the matrix product; everything after it, and the sum of the
    weight's gradient over the chunks, has at least fp32. Without a valid label the loss and all gradients are
    exactly zero, whatever `hidden` holds.

    Args:
        hidden: last hidden states of one rank's tokens.
        weight: the head.
        labels: target ids; any value where `valid` is false.
        valid: which tokens count.
        chunk_elements: the most logits to hold at once (at least one token's).
    """
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, valid, chunk_elements
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The value and the gradient `(softmax(logits) - onehot(label)) * valid`, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, valid: Tensor, chunk_elements: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels, valid)
        ctx.chunk_elements = chunk_elements
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for part in _chunks(hidden.shape[0], weight.shape[0], chunk_elements):
            log_probs = _log_probs(hidden[part], weight)
            targets = labels[part].masked_fill(~valid[part], 0)[:, None]
            of_label = log_probs.gather(1, targets)[:, 0]
            total -= of_label.masked_fill(~valid[part], 0.0).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, valid = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if need_weight else None
        for part in _chunks(hidden.shape[0], weight.shape[0], ctx.chunk_elements):
            of_logits = _log_probs(hidden[part], weight).exp_()
            targets = labels[part].masked_fill(~valid[part], 0)[:, None]
            of_logits.scatter_add_(1, targets, of_logits.new_full(targets.shape, -1.0))
            of_logits = of_logits.mul_(grad).masked_fill_(~valid[part, None], 0.0).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = of_logits @ weight
            if grad_weight is not None:
                rows = hidden[part].masked_fill(~valid[part, None], 0.0)  # 0 * NaN would be NaN
                grad_weight += of_logits.T @ rows
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _chunks(num_tokens: int, vocab_size: int, chunk_elements: int) -> Iterator[slice]:
    step = max(1, chunk_elements // vocab_size)
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))
