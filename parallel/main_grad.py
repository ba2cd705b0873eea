"""Who is first: `main_grad` is not cleared between steps, the first gradient of a step overwrites it.

Clearing writes the whole gradient buffer once, and adding to the zeros reads it once more. Instead a gradient
buffer marks its parameters as stale. Whoever writes `main_grad` asks `claim` whether to overwrite or to add;
what nobody claimed is filled with zeros before anyone reads it. Stale numbers are never part of a sum, nor
multiplied by zero: they may be NaN.

A `main_grad` of less than fp32 (see `GradientBuffer`) takes one gradient a step, and refuses a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isozyme.core.errors import UsageError


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


def adopt(parameter: Tensor, main_grad: Tensor, step: OpenStep) -> None:
    """Give a parameter its `main_grad`, and what goes with it."""
    parameter.main_grad = main_grad  # type: ignore[attr-defined]
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    parameter.main_grad_use = MainGradUse()  # type: ignore[attr-defined]
    parameter.open_step = step  # type: ignore[attr-defined]
    parameter.grad = None


def release(parameter: Tensor) -> None:
    """Take away what `adopt` gave."""
    for name in ("main_grad", "grad_added_to_main_grad", "main_grad_use", "open_step"):
        delattr(parameter, name)


def claim(parameters: Sequence[Tensor]) -> bool:
    """Say, right before writing the `main_grad` of `parameters` in a backward, that it will be written.

    Returns:
        True: overwrite every element, for none has been written in this step. False: add. Where some were
        written and some not, those that were not are filled with zeros, and all are to be added to.

    Raises:
        UsageError: if one of less than fp32 was written in this step already.
    """
    uses = [use_of(parameter) for parameter in parameters]
    first = bool(uses) and all(use.stale for use in uses)
    if not first:
        for parameter, use in zip(parameters, uses, strict=True):
            if use.claimed and is_narrow(parameter):
                raise UsageError(
                    "nothing is added to a gradient that is kept as computed: a second one came for a "
                    f"parameter of shape {tuple(parameter.shape)} in one step, whose main_grad is "
                    f"{_word(parameter)}. Run one backward a step, or set optim.main_grad=fp32."
                )
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


@torch.no_grad()
def take(name: str, parameter: Tensor) -> None:
    """After a backward: move `.grad` to `main_grad`, or note that the backward has written there by itself.

    Args:
        name: the parameter's, for messages.
        parameter: one of a gradient buffer.

    Raises:
        UsageError: if the backward added to stale numbers, or to a `main_grad` of less than fp32.
    """
    main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        if use_of(parameter).stale:
            raise UsageError(
                f"a backward added to {name}.main_grad, which still held the numbers of the step before: "
                "this parameter got ordinary gradients then. Call isozyme.parallel.main_grad.claim in "
                "that backward, and do as it says."
            )
        if is_narrow(parameter):
            raise UsageError(
                f"a backward added to {name}.main_grad by itself, which is {_word(parameter)} and takes what "
                "is returned as a gradient alone. Call isozyme.parallel.main_grad.written_wide for the "
                "parameter before the gradient buffer is made, or set optim.main_grad=fp32."
            )
    elif parameter.grad is not None:
        if claim([parameter]):
            main_grad.copy_(parameter.grad)
        else:
            main_grad.add_(parameter.grad)
    parameter.grad = None


def written_wide(parameters: Iterable[Tensor]) -> None:
    """Say, before a gradient buffer is made, that a backward computes these `main_grad` in fp32 by itself.

    Kept in the parameter's own type they would be rounded, so they are always kept in fp32.

    Raises:
        UsageError: if there is a buffer already that keeps them in less.
    """
    for parameter in parameters:
        if is_narrow(parameter):
            raise UsageError(
                "a backward that writes main_grad in fp32 was chosen after the gradient buffer was made, "
                f"which keeps {_word(parameter)}. Choose first, or set optim.main_grad=fp32."
            )
        parameter.main_grad_written_wide = True  # type: ignore[attr-defined]


def is_narrow(parameter: Tensor) -> bool:
    """Whether the parameter's `main_grad` is of less than fp32, so that nothing can be added to it."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return main_grad is not None and main_grad.dtype != torch.promote_types(main_grad.dtype, torch.float32)


def _word(parameter: Tensor) -> str:
    return str(parameter.main_grad.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
