"""Cross-entropy of a linear head, summed over valid labels, without ever holding all logits.

Tokens are taken in chunks; a chunk's logits are computed, used and forgotten, and computed again in backward.
Only the last chunk's stay for backward, which begins with them: so a head whose logits fit in one chunk makes
none twice, no more than one chunk is ever held, and no bit depends on it. (Computing the gradients in forward
saves as much, as in Liger: Hsu et al. 2024, arXiv:2410.10989. But it rounds them once more when the upstream
gradient comes, passes once more over the head's, and under vocabulary parallelism needs the sums of the other
ranks chunk by chunk.) Under a pipeline schedule that runs several forwards before the first backward (GPipe),
each of them keeps a chunk.

Where the vocabulary is cut over tensor-parallel ranks, each rank has the logits of its own ids only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from isozyme.models.kernels.cross_entropy import cross_entropy_gradient_, softmax_parts
from isozyme.parallel.communicator import Communicator, SingleCommunicator
from isozyme.parallel.tensor import vocabulary_rows

CHUNK_ELEMENTS = 2**27
"""Logits held at once: 256 MiB in bf16, such as 4,096 tokens by 32,000 ids.

With several chunks, the gradient of the head is summed over them in at least fp32, in a buffer of its own.
"""


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
        rows = rows.masked_fill(~mine, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        peak, total, of_label = torch.empty(3, hidden.shape[0], dtype=wide, device=hidden.device)
        logits: Tensor | None = None
        for part in _chunks(hidden.shape[0], weight.shape[0], chunk_elements):
            logits = None  # before the next are made
            logits = hidden[part] @ weight.T
            peak[part], total[part] = softmax_parts(logits)
            of_label[part] = logits.gather(1, rows[part, None])[:, 0]
        of_label.masked_fill_(~mine, 0.0)
        if group.size > 1:
            highest = group.all_reduce(peak.clone(), "max")
            total.mul_((peak - highest).exp_())
            total, of_label = group.all_reduce(torch.stack([total, of_label]))
            peak = highest
        log_total = total.log()
        ctx.save_for_backward(hidden, weight, rows.masked_fill_(~mine, -1), valid, peak, log_total)
        ctx.chunk_elements = chunk_elements
        # Not a saved tensor: the first backward overwrites them, and a second one makes them anew.
        # Under autocast they may have another type than backward's products take.
        ctx.last_logits = logits if logits is not None and logits.dtype == hidden.dtype else None
        return (log_total - (of_label - peak)).masked_fill(~valid, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, valid, peak, log_total = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        logits, ctx.last_logits = ctx.last_logits, None
        for part in reversed(list(_chunks(hidden.shape[0], weight.shape[0], ctx.chunk_elements))):
            if logits is None:
                logits = hidden[part] @ weight.T
            cross_entropy_gradient_(logits, peak[part], log_total[part], targets[part], valid[part], grad)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
            if need_weight:
                rows = hidden[part].masked_fill(~valid[part, None], 0.0)  # 0 * NaN would be NaN
                grad_weight = _sum_of_chunks(grad_weight, logits.T @ rows, grad.dtype)
            logits = None  # before the next are made
        if need_weight:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _sum_of_chunks(total: Tensor | None, part: Tensor, wide: torch.dtype) -> Tensor:
    """The one part as it is; the sum of several in `wide`."""
    return part if total is None else total.to(wide).add_(part)


def _chunks(num_tokens: int, vocab_size: int, chunk_elements: int) -> Iterator[slice]:
    """As few as the limit allows, of equal length but for the last."""
    most = max(1, chunk_elements // vocab_size)
    step = -(-num_tokens // max(1, -(-num_tokens // most)))
    for start in range(0, num_tokens, max(1, step)):
        yield slice(start, min(start + step, num_tokens))
