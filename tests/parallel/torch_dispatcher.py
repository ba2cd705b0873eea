"""A mixture-of-experts layer as somebody would write it for torch.distributed, who has not heard of isozyme.

The names of torch.distributed are bound when this module is imported, before any world exists.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_to_all_single, get_rank, get_world_size


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, output_splits, input_splits, group):  # type: ignore[no-untyped-def]
        ctx.splits, ctx.group = (output_splits, input_splits), group
        output = rows.new_empty((sum(output_splits), *rows.shape[1:]))
        all_to_all_single(output, rows.contiguous(), output_splits, input_splits, group=group)
        return output

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        output_splits, input_splits = ctx.splits
        back = grad.new_empty((sum(input_splits), *grad.shape[1:]))
        all_to_all_single(back, grad.contiguous(), input_splits, output_splits, group=ctx.group)
        return back, None, None, None


def expert(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(rows @ weight)


def moe(
    tokens: Tensor, ids: Tensor, probs: Tensor, weights: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """`weights` [E_local, H, H] are those of this rank's experts; `ids` [T, K] count them over all ranks."""
    size, num_local = get_world_size(group), weights.shape[0]
    assert get_rank(group) < size
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=size * num_local)
    their_counts = torch.empty_like(counts)
    work = all_to_all_single(their_counts, counts, group=group, async_op=True)
    source = order // ids.shape[1]
    rows = tokens[source]
    work.wait()
    input_splits = counts.view(size, num_local).sum(1).tolist()
    output_splits = their_counts.view(size, num_local).sum(1).tolist()
    arrived = Exchange.apply(rows, output_splits, input_splits, group)
    owner = torch.arange(num_local).repeat(size).repeat_interleave(their_counts)
    done = torch.zeros_like(arrived)
    for local in range(num_local):
        (mine,) = (owner == local).nonzero(as_tuple=True)
        done = done.index_add(0, mine, expert(arrived[mine], weights[local]))
    returned = Exchange.apply(done, input_splits, output_splits, group)
    weighted = returned * probs.flatten()[order].unsqueeze(1)
    return torch.zeros_like(tokens).index_add(0, source, weighted)
