"""Starting reductions while backward still runs: marks that backward passes in the order of the layers.

No hook on a gradient says when a layer is done: which gradients arrive, and in which order, depends on the
tokens of a rank. Instead the input of each unit (a layer) carries a mark. Autograd runs nodes that were made
later first, so when backward reaches the mark, everything behind it has its gradients. Ranks of one group run
the same layers, and so pass the same marks between the same other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isozyme.core.errors import UsageError


@dataclass(frozen=True, eq=False, kw_only=True)
class Unit:
    """A part of the model whose gradients are complete when backward leaves it."""

    entry: nn.Module
    """The module whose first argument is the unit's only input with a gradient."""
    parameters: tuple[nn.Parameter, ...]
    """What is used between this input and the loss, but in no unit that backward leaves before."""


def mark(units: Sequence[Unit], passed: Callable[[int], None]) -> list[RemovableHandle]:
    """Call `passed(number)` whenever a backward has left a unit.

    Args:
        units: in the order in which backward leaves them.
        passed: `GradientBuffer.passed`.

    Returns:
        Handles of the forward hooks; `remove()` takes a mark away.
    """
    return [
        unit.entry.register_forward_pre_hook(partial(_mark, partial(passed, number)))
        for number, unit in enumerate(units)
    ]


def _mark(
    passed: Callable[[], None], module: nn.Module, arguments: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    if not arguments or not isinstance(arguments[0], Tensor):
        raise UsageError(
            f"a marked module takes hidden states as its first positional argument: {type(module).__name__} "
            "was called without. Call it so, or set optim.overlap_reduce=false."
        )
    if not (torch.is_grad_enabled() and arguments[0].requires_grad):
        return None
    return _Mark.apply(arguments[0], passed), *arguments[1:]  # type: ignore[no-untyped-call]


class _Mark(torch.autograd.Function):
    """Identity; its backward says that it was reached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.passed()
        return grads[0], None
