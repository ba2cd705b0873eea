"""Windows brought to the device, and the counts of their step, while it works on the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.genome.windows import totals_of
from isozyme.launch.step import step_totals
from isozyme.parallel.process_groups import ProcessGroups

_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What one step trains on."""

    totals: StepTotals
    _batches: Sequence[Batch]
    _arrived: torch.cuda.Event | None = None

    def batches(self) -> Sequence[Batch]:
        """This rank's micro-batches, on its device; what is launched from now on finds them there."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        return self._batches


class Preparation:
    """Counts and copies micro-batches without waiting for the device, nor making it wait.

    Copies run on a stream of their own; counts are added up over ranks on the host.

    Args:
        groups: this rank's groups; their communicators must be able to send from the host.
        device: where the model is.
    """

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Sequence[Batch]) -> Prepared:
        """Start to bring micro-batches from the host to the device. All ranks call it together.

        They must be kept until the step that uses them is over.
        """
        totals = step_totals(totals_of(batches), self._groups, _HOST)
        if self._copies is None:
            return Prepared(totals=totals, _batches=[batch.to(self._device) for batch in batches])
        with torch.cuda.stream(self._copies):
            there = [batch.to(self._device) for batch in batches]
            return Prepared(totals=totals, _batches=there, _arrived=self._copies.record_event())
