"""Weight gradients that are computed later than the gradients of the rows.

A layer's backward needs the gradients of the rows first: another rank waits for them. Autograd runs what was
computed later in forward first, so a node that the weights pass through *before* the rows arrive comes, in
backward, after the exchange of the rows' gradients has started. That node multiplies what the experts' own
backward has left here, while the exchange is under way. No thread and no stream of our own is needed, and
whatever waits for the weights' gradients (marks of `isozyme.parallel.overlap` included) comes later still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

Later = Callable[[], Tensor | None]
"""Computes a gradient; None if it has been added where it belongs already."""


class DelayedGradients:
    """What one forward pass of the experts owes to its weights' gradients."""

    def __init__(self) -> None:
        self._owed: dict[int, dict[int | None, Later]] = {}

    def leave(self, stack: int, gradient: Later, *, expert: int | None = None) -> None:
        """Leave the gradient of a whole stack, or of one expert's slice, for when backward comes past.

        Called in the experts' backward; in forward by a backend that keeps its operands itself.

        Args:
            stack: 0 for gate-up, 1 for down.
            gradient: computes it; called once.
            expert: the slice, if not the whole. Then every expert leaves one.
        """
        self._owed.setdefault(stack, {})[expert] = gradient

    def settle(self, stack: int) -> Tensor | None:
        """Compute the gradient of a stack; None if nothing was left for it, or it needs no further step."""
        owed = self._owed.pop(stack, {})
        if None in owed:
            return owed[None]()
        slices = [owed[expert]() for expert in range(len(owed))]
        return torch.stack([each for each in slices if each is not None]) if slices else None


def delay_point(
    gate_up: Float[Tensor, "E_local F2 H"], down: Float[Tensor, "E_local H F"]
) -> tuple[Float[Tensor, "E_local F2 H"], Float[Tensor, "E_local H F"], DelayedGradients]:
    """The same stacks; their gradients are computed where backward comes past this point.

    Call it after an exchange of rows has started and before it is finished.
    """
    delayed = DelayedGradients()
    gate_up, down = _Point.apply(delayed, gate_up, down)  # type: ignore[no-untyped-call]
    return gate_up, down, delayed


class _Point(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delayed: DelayedGradients, *stacks: Tensor) -> tuple[Tensor, ...]:
        ctx.delayed = delayed
        ctx.set_materialize_grads(False)  # no zeros as large as a stack where a gradient was left for later
        return tuple(stack.view_as(stack) for stack in stacks)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = list(grads)
        for stack in reversed(range(len(grads))):
            late = ctx.delayed.settle(stack)
            found[stack] = found[stack] if late is None else late
        return None, *found


def reach(rows: Float[Tensor, "N H"], *stacks: Tensor) -> Float[Tensor, "N H"]:
    """`rows`, whose backward leads to the stacks' `delay_point` too: for a backend that does not use them."""
    result: Tensor = _Reach.apply(rows, *stacks)  # type: ignore[no-untyped-call]
    return result


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *stacks: Tensor) -> Tensor:
        ctx.count = len(stacks)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], *[None] * ctx.count
