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

Later = Callable[[], Tensor]


class DelayedGradients:
    """What one forward pass of the experts owes to its weights' gradients."""

    def __init__(self) -> None:
        self._owed: dict[int, dict[int | None, Later]] = {}
        self._also: list[Callable[[], None]] = []

    def leave(self, stack: int, gradient: Later, *, expert: int | None = None) -> None:
        """Called in the experts' backward: `gradient()` is that of a whole stack, or of one expert's slice.

        Args:
            stack: 0 for gate-up, 1 for down.
            gradient: computes it; called once.
            expert: the slice, if not the whole. Then every expert leaves one.
        """
        self._owed.setdefault(stack, {})[expert] = gradient

    def leave_call(self, call: Callable[[], None]) -> None:
        """Called in the experts' backward: `call()` computes gradients and adds them where they belong."""
        self._also.append(call)

    def settle(self, stack: int) -> Tensor | None:
        """Compute the gradient of a stack; None if nothing was left for it."""
        owed = self._owed.pop(stack, {})
        if not owed:
            return None
        if None in owed:
            return owed[None]()
        # In the order in which they were left, which frees the largest operands first.
        found = {expert: gradient() for expert, gradient in owed.items()}
        return torch.stack([found[expert] for expert in range(len(found))])

    def settle_calls(self) -> None:
        """Make the calls that were left."""
        calls, self._also = self._also, []
        for call in calls:
            call()


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
        ctx.delayed.settle_calls()
        later = [ctx.delayed.settle(stack) for stack in range(len(grads))]
        return None, *(grad if late is None else late for grad, late in zip(grads, later, strict=True))


def reach(rows: Float[Tensor, "N H"], *stacks: Tensor) -> Float[Tensor, "N H"]:
    """`rows`, whose backward also reaches the stacks' `delay_point`, for backends that do not use the stacks."""
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
