"""Collectives with gradients: pairs in which the backward of one is the forward of the other.

A tensor on a group of ranks is *replicated* (the same on all ranks, and so is its gradient), *sharded* (each
rank has its rows) or *varying* (each rank has its own, such as a partial sum). The loss is the sum of what
all ranks contribute, where what is computed from replicated tensors alone counts once.

| function | from → to | forward | backward |
|---|---|---|---|
| `copy_to_group` | replicated → varying | identity | all-reduce |
| `reduce_from_group` | varying → replicated | all-reduce | identity |
| `gather_from_group` | sharded → varying | all-gather | reduce-scatter |
| `reduce_scatter_to_group` | varying → sharded | reduce-scatter | all-gather |
| `split_to_group` | replicated → sharded | own rows | all-gather |
| `gather_replicated_from_group` | sharded → replicated | all-gather | own rows |
| `all_to_all` | sharded → sharded | all-to-all | the inverse all-to-all |

`copy` and `reduce` are f and g of Shoeybi et al., "Megatron-LM" (arXiv:1909.08053); `gather` and
`reduce_scatter` are g and g-bar of sequence parallelism, Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (arXiv:2205.05198); the all-to-all that sends tokens to their
experts and back is that of Lepikhin et al., "GShard" (arXiv:2006.16668).
All can be differentiated twice, but for those in two halves (`…_start` and `finish`, of
`isozyme.parallel.collective_halves`).

A backward collective needs every rank, also one without rows. So the functions do not ask whether this rank's
tensor happens to require a gradient: with `differentiable=True` (and gradients enabled) the result always
requires one. Ranks must pass the same value, and each rank's loss must depend on the result (a sum over zero
rows is enough).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import Function

from isozyme.parallel.collective_arguments import Sizes, apply, marked, shares_of, sizes_or_equal, splits_of
from isozyme.parallel.collective_halves import InFlight as InFlight
from isozyme.parallel.collective_halves import all_to_all_start as all_to_all_start
from isozyme.parallel.collective_halves import finish as finish
from isozyme.parallel.collective_halves import gather_from_group_start as gather_from_group_start
from isozyme.parallel.collective_halves import reduce_scatter_to_group_start as reduce_scatter_to_group_start
from isozyme.parallel.communicator import Communicator

Collective = Callable[[Tensor], Tensor]
"""A communication whose one tensor may need a gradient."""


def copy_to_group(
    x: Shaped[Tensor, "*shape"], comm: Communicator, *, differentiable: bool = True
) -> Shaped[Tensor, "*shape"]:
    """Give a replicated tensor to computations that differ between ranks.

    Forward: identity. Backward: all-reduce, sending 2 n (size-1)/size bytes per rank for n bytes of x.
    Conjugate: `reduce_from_group`.
    """
    return _conjugate(x, differentiable, forth=_same, back=lambda grad: _sum(grad, comm))


def reduce_from_group(
    x: Shaped[Tensor, "*shape"], comm: Communicator, *, differentiable: bool = True
) -> Shaped[Tensor, "*shape"]:
    """Sum a varying tensor over the group into a replicated one.

    Forward: all-reduce, sending 2 n (size-1)/size bytes per rank. Backward: identity, which is right only if
    all ranks compute the same from the result. Conjugate: `copy_to_group`; where ranks use the sum
    differently, compose the two.
    """
    return _conjugate(x, differentiable, forth=lambda part: _sum(part, comm), back=_same)


def gather_from_group(
    x: Shaped[Tensor, "N *row"], comm: Communicator, sizes: Sizes = None, *, differentiable: bool = True
) -> Shaped[Tensor, "R *row"]:
    """All ranks' rows, for computations that differ between ranks.

    Args:
        x: `[n, ...]`, this rank's rows.
        comm: the group.
        sizes: rows of each rank, the same list on all ranks; by default as many as here.
        differentiable: whether to build a graph; the same on all ranks.

    Returns:
        `[sum(sizes), ...]`. Forward: all-gather, each rank sending its rows to size-1 others. Backward:
        reduce-scatter of the same volume. Conjugate: `reduce_scatter_to_group`.
    """
    counts = sizes_or_equal(sizes, x.shape[0], comm)
    return _conjugate(
        x,
        differentiable,
        forth=lambda rows: comm.all_gather(rows, counts),
        back=lambda grad: comm.reduce_scatter(grad, counts),
    )


def reduce_scatter_to_group(
    x: Shaped[Tensor, "N *row"], comm: Communicator, sizes: Sizes = None, *, differentiable: bool = True
) -> Shaped[Tensor, "R *row"]:
    """Sum a varying tensor over the group, and keep this rank's rows of the sum.

    Args:
        x: `[sum(sizes), ...]`, this rank's summand for all ranks' rows.
        comm: the group.
        sizes: rows that each rank keeps, the same list on all ranks; by default equal shares.
        differentiable: whether to build a graph; the same on all ranks.

    Returns:
        `[sizes[rank], ...]`. Forward: reduce-scatter, each rank sending the others' rows. Backward:
        all-gather. Conjugate: `gather_from_group`.
    """
    counts = shares_of(sizes, x, comm, "reduce_scatter_to_group")
    return _conjugate(
        x,
        differentiable,
        forth=lambda rows: comm.reduce_scatter(rows, counts),
        back=lambda grad: comm.all_gather(grad, counts),
    )


def split_to_group(
    x: Shaped[Tensor, "N *row"], comm: Communicator, sizes: Sizes = None, *, differentiable: bool = True
) -> Shaped[Tensor, "R *row"]:
    """This rank's rows of a replicated tensor.

    Args:
        x: `[sum(sizes), ...]`, the same on all ranks.
        comm: the group.
        sizes: rows of each rank, the same list on all ranks; by default equal shares.
        differentiable: whether to build a graph; the same on all ranks.

    Returns:
        `[sizes[rank], ...]`. Forward: no communication. Backward: all-gather, each rank sending its rows to
        size-1 others. Conjugate: `gather_replicated_from_group`.
    """
    counts = shares_of(sizes, x, comm, "split_to_group")
    return _conjugate(
        x,
        differentiable,
        forth=lambda rows: _own_rows(rows, comm, counts),
        back=lambda grad: comm.all_gather(grad, counts),
    )


def gather_replicated_from_group(
    x: Shaped[Tensor, "N *row"], comm: Communicator, sizes: Sizes = None, *, differentiable: bool = True
) -> Shaped[Tensor, "R *row"]:
    """All ranks' rows as a replicated tensor, from which all ranks compute the same.

    Forward: all-gather, each rank sending its rows to size-1 others. Backward: this rank's rows of the
    gradient, without communication. Conjugate: `split_to_group`. Where ranks use the rows differently, the
    gradient needs `gather_from_group`.
    """
    counts = sizes_or_equal(sizes, x.shape[0], comm)
    return _conjugate(
        x,
        differentiable,
        forth=lambda rows: comm.all_gather(rows, counts),
        back=lambda grad: _own_rows(grad, comm, counts),
    )


def all_to_all(
    x: Shaped[Tensor, "N *row"],
    comm: Communicator,
    output_splits: Sizes = None,
    input_splits: Sizes = None,
    *,
    differentiable: bool = True,
) -> Shaped[Tensor, "R *row"]:
    """Send rows to each rank of the group and receive rows from each.

    Args:
        x: `[sum(input_splits), ...]`, rows for rank 0 first.
        comm: the group.
        output_splits: rows received from each rank; equal shares by default.
        input_splits: rows sent to each rank; equal shares by default.
        differentiable: whether to build a graph; the same on all ranks.

    Returns:
        `[sum(output_splits), ...]`, rows from rank 0 first. Forward: all-to-all, each rank sending the rows
        of the others. Backward: the all-to-all with the splits swapped (its own conjugate).
    """
    out, into = splits_of(x, comm, output_splits, input_splits)
    return _conjugate(
        x,
        differentiable,
        forth=lambda rows: comm.all_to_all(rows, out, into),
        back=lambda grad: comm.all_to_all(grad, into, out),
    )


def _conjugate(x: Tensor, differentiable: bool, *, forth: Collective, back: Collective) -> Tensor:
    """`forth(x)`, whose backward is `back`, whose backward is `forth`."""
    return apply(_Conjugate, marked(x, differentiable), forth, back)


class _Conjugate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Collective, back: Collective) -> Tensor:
        ctx.forth, ctx.back = forth, back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return apply(_Conjugate, grad, ctx.back, ctx.forth), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, comm: Communicator) -> Tensor:
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _own_rows(x: Tensor, comm: Communicator, sizes: tuple[int, ...]) -> Tensor:
    return x.narrow(0, sum(sizes[: comm.rank]), sizes[comm.rank]).clone()
