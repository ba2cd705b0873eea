"""How long copies that were computed from weights hold: while a step lasts and nothing writes them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from isozyme.parallel.main_grad import OpenStep


class StepOfWeights:
    """Whether weights are those of the last call: within one open step of their gradient buffer, unwritten.

    Two signs, since a kept copy of weights that have changed is a silent fault: the step, which the buffer
    opens and closes around all updates (however they write), and the weights' version, which every in-place
    change by torch raises (loading, for instance).
    """

    def __init__(self) -> None:
        self._known: tuple[int, int, int] | None = None

    def same(self, weights: Sequence[Tensor]) -> bool | None:
        """None where no step is open: then nothing may be kept."""
        step: OpenStep | None = getattr(weights[0], "open_step", None)
        if step is None or step.number is None:
            self._known = None
            return None
        before, self._known = self._known, (step.number, weights[0]._version, weights[0].data_ptr())
        return before == self._known
