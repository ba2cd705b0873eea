"""Collectives with gradients in two halves: what is computed between start and finish overlaps with them.

In backward the halves change roles, so that what was computed in between overlaps there too. What each one
does to rows and to gradients is said in `isozyme.parallel.collectives`, which offers them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isozyme.parallel.collective_arguments import Sizes, apply, marked, shares_of, sizes_or_equal, splits_of
from isozyme.parallel.communicator import Communicator, Pending


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
    out, into = splits_of(x, comm, output_splits, input_splits)
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
    counts = sizes_or_equal(sizes, x.shape[0], comm)
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
    counts = shares_of(sizes, x, comm, "reduce_scatter_to_group")
    return _started(
        x,
        differentiable,
        forth=lambda rows: comm.reduce_scatter_async(rows, counts),
        back=lambda grad: comm.all_gather_async(grad, counts),
    )


def finish(in_flight: InFlight) -> Tensor:
    """Wait for the rows of a collective that has been started."""
    return apply(_Finish, in_flight.token, in_flight.state)


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
    return InFlight(apply(_Start, marked(x, differentiable), state), state)
