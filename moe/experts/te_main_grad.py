"""Letting Transformer Engine's weight-gradient GEMMs overwrite `main_grad` where they come first in a step.

`GroupedLinear` reads in forward whether to overwrite (`overwrite_main_grad` of its first weight). But which
micro-batch is first is known in backward alone: schedules may order backwards as they like. So the choice is
made right before the backward, in the field where the module keeps it (read from version 2.20.2). Where that
field is missing, stale gradients are filled with zeros, and the GEMMs add.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from isozyme.parallel.main_grad import claim, fill

_OVERWRITES = "origin_weights_overwrite_main_grad"


def claim_in_backward(result: Tensor, parameters: Sequence[Tensor]) -> None:
    """Decide, when backward comes to `result`, whether the weight gradients overwrite or add.

    Args:
        result: what the module returned, right after it did.
        parameters: those whose `main_grad` its backward writes.
    """
    if result.grad_fn is None:
        return
    node = weakref.ref(result.grad_fn)  # the hook belongs to the node: a strong reference would be a cycle

    def choose(_: Any) -> None:
        context = node()
        supported = hasattr(context, _OVERWRITES)
        if not supported:
            fill(parameters)
        first = claim(parameters)
        if supported:
            setattr(context, _OVERWRITES, first)

    result.grad_fn.register_prehook(choose)
