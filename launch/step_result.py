"""What one optimiser step did, as every rank knows it afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from isozyme.core.batch import StepTotals


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank."""

    totals: StepTotals
    loss: float
    """Mean cross-entropy in nats over all valid labels of the step; NaN if it had none."""
    aux_loss: float
    """Mean balance loss over all windows with real tokens, coefficient included."""
    z_loss: float
    """Mean router z-loss over all real tokens, coefficient included."""
    grad_norm: float
    """Global norm before clipping."""
    clip: float
    """What every gradient was multiplied by; 1.0 if nothing was clipped."""
    routed: Int[Tensor, "L E"]
    """Slots that chose each expert of each mixture-of-experts layer of the model, before capacity; on the
    CPU."""
    dropped: Int[Tensor, "L E"]
    """Slots that capacity dropped; on the CPU."""
    skipped: bool = False
    """Whether no label of the step was valid, so that all ranks left the weights alone."""

    @property
    def bits_per_base(self) -> float:
        """The loss in bits: `loss / ln 2`."""
        return self.loss / math.log(2)

    @staticmethod
    def without_labels(totals: StepTotals) -> StepResult:
        """The step in which no label was valid anywhere: nothing to learn from, on no rank."""
        none = torch.zeros((0, 0), dtype=torch.int64)
        return StepResult(
            totals=totals,
            loss=math.nan,
            aux_loss=0.0,
            z_loss=0.0,
            grad_norm=0.0,
            clip=1.0,
            routed=none,
            dropped=none,
            skipped=True,
        )
