"""Cross-entropy of a linear head, summed over valid labels, without ever holding all logits.

Tokens are taken in chunks; a chunk's logits are computed, used and forgotten, and computed again in backward.
Where the vocabulary is cut over tensor-parallel ranks, each rank has the logits of its own ids only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from isozyme.parallel.communicator import Communicator, SingleCommunicator
from isozyme.parallel.tensor import vocabulary_rows

CHUNK_ELEMENTS = 2**26
"""Logits held at once: 256 MiB in fp32. Each chunk also passes once over the gradient of the head."""


def cross_entropy_sum(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "V H"],
    labels: Int[Tensor, "T"],
    valid: Bool[Tensor, "T"],
    *,
    group: Communicator | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Float[Tensor, ""]:
    """The sum over valid labels of `logsumexp(logits) - logits[label]`, in nats.

    Logits are rounded to the dtype of `hidden` by the matrix product; everything after it, and the sum of the
    weight's gradient over the chunks, has at least fp32. Without a valid label the loss and all gradients are
    exactly zero, whatever `hidden` holds.

    With a group, every rank gets the same sum, which counts once. The gradient of `hidden` is then each
    rank's part of the sum over the group, as the backward of `isozyme.parallel.tensor.gather_tokens` expects,
    and that of `weight` is whole. Forward: an all-reduce of T and one of 2 T numbers of at least fp32,
    however many chunks there are; backward: no communication.

    Args:
        hidden: last hidden states; with a group all ranks' tokens, the same on each.
        weight: the head; with a group this rank's rows of it, rank r's from id `r V`.
        labels: target ids of the whole vocabulary; any value where `valid` is false.
        valid: which tokens count.
        group: the tensor-parallel ranks that hold equal parts of the vocabulary; None for one rank alone.
        chunk_elements: the most logits to hold at once (at least one token's).
    """
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, valid, group, chunk_elements
    )
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The value and the gradient `(softmax(logits) - onehot(label)) * valid`, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        valid: Tensor,
        group: Communicator | None,
        chunk_elements: int,
    ) -> Tensor:
        group = SingleCommunicator() if group is None else group
        rows, mine = vocabulary_rows(labels, weight.shape[0], group)
        mine &= valid
        targets = rows.masked_fill(~mine, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        peak, total, of_label = torch.empty(3, hidden.shape[0], dtype=wide, device=hidden.device)
        for part in _chunks(hidden.shape[0], weight.shape[0], chunk_elements):
            logits = _logits(hidden[part], weight)
            # Finite, so that ids without any probability add zero (and not NaN) to those of other ranks.
            peak[part] = logits.amax(dim=1).clamp_min(torch.finfo(wide).min)
            of_label[part] = logits.gather(1, targets[part, None])[:, 0]
            total[part] = logits.sub_(peak[part, None]).exp_().sum(dim=1)
        of_label.masked_fill_(~mine, 0.0)
        if group.size > 1:
            highest = group.all_reduce(peak.clone(), "max")
            total.mul_((peak - highest).exp_())
            total, of_label = group.all_reduce(torch.stack([total, of_label]))
            peak = highest
        log_total = total.log()
        ctx.save_for_backward(hidden, weight, targets, valid, mine, peak, log_total)
        ctx.chunk_elements = chunk_elements
        return (log_total - (of_label - peak)).masked_fill(~valid, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, valid, mine, peak, log_total = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if need_weight else None
        for part in _chunks(hidden.shape[0], weight.shape[0], ctx.chunk_elements):
            of_logits = _logits(hidden[part], weight)
            of_logits.sub_(peak[part, None]).sub_(log_total[part, None]).exp_()
            of_logits.scatter_add_(1, targets[part, None], -mine[part, None].to(of_logits.dtype))
            of_logits = of_logits.mul_(grad).masked_fill_(~valid[part, None], 0.0).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = of_logits @ weight
            if grad_weight is not None:
                rows = hidden[part].masked_fill(~valid[part, None], 0.0)  # 0 * NaN would be NaN
                grad_weight += of_logits.T @ rows
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: Float[Tensor, "T H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "T V"]:
    """Logits in at least fp32, in memory of their own."""
    logits = hidden @ weight.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _chunks(num_tokens: int, vocab_size: int, chunk_elements: int) -> Iterator[slice]:
    step = max(1, chunk_elements // vocab_size)
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))
