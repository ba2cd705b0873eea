"""What torch.distributed gets back from a simulated process group.

A `SimulatedWork` writes the outputs when it is waited for, as a real one may; code that reads them earlier
reads what was there before.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from isozyme.parallel.simulated import SimulatedPending

_Parts = Sequence[tuple[SimulatedPending, Sequence[Tensor]]]


class SimulatedWork(dist.Work):
    """Operations under way; the outputs are written by `wait()`.

    Args:
        parts: the pending calls and the tensors that each of them fills.
        outputs: what `result()` returns.
    """

    def __init__(self, parts: _Parts, outputs: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._parts, self._outputs = list(parts), list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - simulated ranks have no clock
        """Block until the outputs are there."""
        while self._parts:
            pending, targets = self._parts[0]
            received = pending.wait()
            del self._parts[0]
            if targets and received is not None:
                _write(received, targets)
        return True

    def synchronize(self) -> None:
        """Block until the outputs are there."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait()` would return at once; the other ranks get a chance to run first."""
        return all(pending.arrived() for pending, _ in self._parts)

    def result(self) -> list[Tensor]:
        """The outputs, after a wait."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """The outputs as a future that is complete: this waits."""
        future: Any = Future()
        future.set_result(self.result())
        return future


def _write(received: Tensor, targets: Sequence[Tensor]) -> None:
    """Lay the elements of `received` into the targets, one after the other."""
    pieces = received.reshape(-1).split([target.numel() for target in targets])
    with torch.no_grad():
        for target, piece in zip(targets, pieces, strict=True):
            target.detach().copy_(piece.view(target.shape))
