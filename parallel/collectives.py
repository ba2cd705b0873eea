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
All but those in two halves (`…_start`, `finish`) can be differentiated twice.

A backward collective needs every rank, also one without rows. So the functions do not ask whether this rank's
tensor happens to require a gradient: with `differentiable=True` (and gradients enabled) the result always
requires one. Ranks must pass the same value, and each rank's loss must depend on the result (a sum over zero
rows is enough).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isozyme.parallel.communicator import Communicator, Pending

Sizes = Sequence[int] | None


def copy_to_group(
    x: Shaped[Tensor, "*shape"], comm: Communicator, *, differentiable: bool = True
) -> Shaped[Tensor, "*shape"]:
    """Give a replicated tensor to computations that differ between ranks.

    Forward: identity. Backward: all-reduce, sending 2 n (size-1)/size bytes per rank for n bytes of x.
    Conjugate: `reduce_from_group`.
    """
    return _apply(_Copy, _marked(x, differentiable), comm)


def reduce_from_group(
    x: Shaped[Tensor, "*shape"], comm: Communicator, *, differentiable: bool = True
) -> Shaped[Tensor, "*shape"]:
    """Sum a varying tensor over the group into a replicated one.

    Forward: all-reduce, sending 2 n (size-1)/size bytes per rank. Backward: identity, which is right only if
    all ranks compute the same from the result. Conjugate: `copy_to_group`; where ranks use the sum
    differently, compose the two.
    """
    return _apply(_Reduce, _marked(x, differentiable), comm)


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
    counts = _sizes(sizes, x.shape[0], comm)
    return _apply(_Gather, _marked(x, differentiable), comm, counts)


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
    counts = _shares(sizes, x, comm, "reduce_scatter_to_group")
    return _apply(_ReduceScatter, _marked(x, differentiable), comm, counts)


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
    counts = _shares(sizes, x, comm, "split_to_group")
    return _apply(_Split, _marked(x, differentiable), comm, counts)


def gather_replicated_from_group(
    x: Shaped[Tensor, "N *row"], comm: Communicator, sizes: Sizes = None, *, differentiable: bool = True
) -> Shaped[Tensor, "R *row"]:
    """All ranks' rows as a replicated tensor, from which all ranks compute the same.

    Forward: all-gather, each rank sending its rows to size-1 others. Backward: this rank's rows of the
    gradient, without communication. Conjugate: `split_to_group`. Where ranks use the rows differently, the
    gradient needs `gather_from_group`.
    """
    counts = _sizes(sizes, x.shape[0], comm)
    return _apply(_GatherReplicated, _marked(x, differentiable), comm, counts)


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
    out, into = _splits(x, comm, output_splits, input_splits)
    return _apply(_AllToAll, _marked(x, differentiable), comm, out, into)


@dataclass(eq=False)
class InFlight:
    """A collective that has been started; hand it to `finish`."""

    token: Tensor
    """Ties the two halves together in the graph; it has no elements, so that making it launches nothing."""
    state: _Halves


def all_to_all_start(
    x: Shaped[Tensor, "N *row"],
    comm: Communicator,
    output_splits: Sizes = None,
    input_splits: Sizes = None,
    *,
    differentiable: bool = True,
) -> InFlight:
    """Start `all_to_all`; what is computed before `finish` overlaps with it.

    In backward the two halves change roles: the backward of finish starts the inverse all-to-all and that of
    start waits for it, so what was computed between them overlaps there too. It can be differentiated once.
    `x` must not change before the finish.
    """
    out, into = _splits(x, comm, output_splits, input_splits)
    return _started(
        x,
        differentiable,
        forth=lambda rows: comm.all_to_all_async(rows, out, into),
        back=lambda grad: comm.all_to_all_async(grad, into, out),
    )


def gather_from_group_start(
    x: Shaped[Tensor, "N *row"], comm: Communicator, sizes: Sizes = None, *, differentiable: bool = True
) -> InFlight:
    """Start `gather_from_group`; otherwise as `all_to_all_start`."""
    counts = _sizes(sizes, x.shape[0], comm)
    return _started(
        x,
        differentiable,
        forth=lambda rows: comm.all_gather_async(rows, counts),
        back=lambda grad: comm.reduce_scatter_async(grad, counts),
    )


def reduce_scatter_to_group_start(
    x: Shaped[Tensor, "N *row"], comm: Communicator, sizes: Sizes = None, *, differentiable: bool = True
) -> InFlight:
    """Start `reduce_scatter_to_group`; otherwise as `all_to_all_start`."""
    counts = _shares(sizes, x, comm, "reduce_scatter_to_group")
    return _started(
        x,
        differentiable,
        forth=lambda rows: comm.reduce_scatter_async(rows, counts),
        back=lambda grad: comm.all_gather_async(grad, counts),
    )


def finish(in_flight: InFlight) -> Tensor:
    """Wait for the rows of a collective that has been started."""
    return _apply(_Finish, in_flight.token, in_flight.state)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _apply(_Reduce, grad, ctx.comm), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _apply(_Copy, grad, ctx.comm), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, sizes: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return comm.all_gather(x, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_ReduceScatter, grad, ctx.comm, ctx.sizes), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, sizes: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return comm.reduce_scatter(x, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Gather, grad, ctx.comm, ctx.sizes), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, sizes: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return x.narrow(0, sum(sizes[: comm.rank]), sizes[comm.rank]).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_GatherReplicated, grad, ctx.comm, ctx.sizes), None, None


class _GatherReplicated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, sizes: tuple[int, ...]) -> Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return comm.all_gather(x, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _apply(_Split, grad, ctx.comm, ctx.sizes), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, comm: Communicator, out: tuple[int, ...], into: tuple[int, ...]
    ) -> Tensor:
        ctx.comm, ctx.out, ctx.into = comm, out, into
        return comm.all_to_all(x, out, into)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _apply(_AllToAll, grad, ctx.comm, ctx.into, ctx.out), None, None, None


@dataclass(eq=False)
class _Halves:
    """What start and finish share, in forward and in backward."""

    forth: Callable[[Tensor], Pending]
    """Starts the collective …"""
    back: Callable[[Tensor], Pending]
    """… and its conjugate."""
    forward: Pending | None = None
    backward: Pending | None = None


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, state: _Halves) -> Tensor:
        ctx.state = state
        state.forward = state.forth(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        pending, ctx.state.backward = ctx.state.backward, None
        return pending.wait(), None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, _token: Tensor, state: _Halves) -> Tensor:
        ctx.state = state
        pending, state.forward = state.forward, None
        if pending is None:
            raise RuntimeError("a collective is finished once: this one has been finished already.")
        result: Tensor = pending.wait()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.state.backward = ctx.state.back(grad)
        return grad.new_empty(0), None


def _started(
    x: Tensor,
    differentiable: bool,
    *,
    forth: Callable[[Tensor], Pending],
    back: Callable[[Tensor], Pending],
) -> InFlight:
    state = _Halves(forth, back)
    return InFlight(_apply(_Start, _marked(x, differentiable), state), state)


def _apply(function: type[Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _marked(x: Tensor, differentiable: bool) -> Tensor:
    """`x` such that the function is on the graph on every rank alike, or on none."""
    if not differentiable:
        return x.detach()
    if torch.is_grad_enabled() and x.is_floating_point() and not x.requires_grad:
        return x.detach().requires_grad_()
    return x


def _sizes(sizes: Sizes, rows: int, comm: Communicator) -> tuple[int, ...]:
    return tuple(sizes) if sizes is not None else (rows,) * comm.size


def _shares(sizes: Sizes, x: Tensor, comm: Communicator, name: str) -> tuple[int, ...]:
    if sizes is None:
        if x.shape[0] % comm.size:
            raise ValueError(
                f"{name} over {comm.name}: {x.shape[0]} rows are not divisible by {comm.size} ranks. "
                "Give sizes."
            )
        return (x.shape[0] // comm.size,) * comm.size
    if len(sizes) != comm.size or sum(sizes) != x.shape[0]:
        raise ValueError(
            f"{name} over {comm.name}: sizes must give each of the {comm.size} ranks its part of the "
            f"{x.shape[0]} rows: sizes={list(sizes)}."
        )
    return tuple(sizes)


def _splits(
    x: Tensor, comm: Communicator, output_splits: Sizes, input_splits: Sizes
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if (output_splits is None) != (input_splits is None):
        raise ValueError(
            f"all_to_all over {comm.name}: give both output_splits and input_splits, or neither."
        )
    if output_splits is None or input_splits is None:
        equal = _shares(None, x, comm, "all_to_all")
        return equal, equal
    return tuple(output_splits), tuple(input_splits)
