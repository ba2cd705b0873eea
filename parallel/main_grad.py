"""Who is first: `main_grad` is not cleared between steps, the first gradient of a step overwrites it.

Clearing writes the whole gradient buffer once, and adding to the zeros reads it once more. Instead a gradient
buffer marks its parameters as stale. Whoever writes `main_grad` asks `claim` whether to overwrite or to add;
what nobody claimed is filled with zeros before anyone reads it. Stale numbers are never part of a sum, nor
multiplied by zero: they may be NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class MainGradUse:
    """What has happened to one parameter's `main_grad` in this step; the attribute `main_grad_use`."""

    stale: bool = False
    """Whether it still holds numbers of an earlier step."""
    claimed: bool = False
    """Whether somebody who asks first has written it."""


@dataclass(eq=False)
class OpenStep:
    """The step that a buffer is in; every parameter has its buffer's as `open_step`."""

    number: int | None = None
    """Set by `zero()`, another one each time; None after `reduce()`, when parameters may change.

    While it is the same number, parameters have not been updated: what was computed from them still holds.
    """


def claim(parameters: Sequence[Tensor]) -> bool:
    """Say, right before writing the `main_grad` of `parameters` in a backward, that it will be written.

    Returns:
        True: overwrite every element, for none has been written in this step. False: add. Where some were
        written and some not, those that were not are filled with zeros, and all are to be added to.
    """
    uses = [use_of(parameter) for parameter in parameters]
    first = bool(uses) and all(use.stale for use in uses)
    if not first:
        fill(parameters)
    for use in uses:
        use.stale, use.claimed = False, True
    return first


def forget(parameters: Iterable[Tensor]) -> None:
    """Begin a step: every `main_grad` is stale, or zero where nobody claimed it in the last step."""
    unasked = []
    for parameter in parameters:
        use = use_of(parameter)
        if not use.claimed:
            unasked.append(parameter)
        use.stale, use.claimed = True, False
    fill(unasked)


def use_of(parameter: Tensor) -> MainGradUse:
    """The parameter's mark; a fresh one (never stale) where no gradient buffer has set any."""
    found = getattr(parameter, "main_grad_use", None)
    return found if isinstance(found, MainGradUse) else MainGradUse()


@torch.no_grad()
def fill(parameters: Iterable[Tensor]) -> None:
    """Fill the `main_grad` of those parameters that are stale with zeros."""
    stale = [parameter for parameter in parameters if use_of(parameter).stale]
    if stale:
        torch._foreach_zero_([parameter.main_grad for parameter in stale])  # type: ignore[attr-defined]
    for parameter in stale:
        use_of(parameter).stale = False
