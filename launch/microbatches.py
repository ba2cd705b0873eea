"""Forward and backward of a step's micro-batches, and the sums over them that the step makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from jaxtyping import Int
from torch import Tensor

from isozyme.core.batch import Batch, StepTotals
from isozyme.models.stage import Overrides, Stage
from isozyme.models.types import ModelOutput
from isozyme.moe.types import RouterStats, Routing


@dataclass
class Sums:
    """Sums over this rank's micro-batches of one step, in its own chunks (no gradients)."""

    loss: Tensor | None = None
    """[3] in fp64: cross-entropy (0 on a stage without the head), balance loss, z-loss."""
    _counts: dict[int, Tensor] = field(default_factory=dict)
    """For each chunk with expert layers `[2, L, E]` int64: routed and dropped slots."""
    routings: list[list[Routing]] = field(default_factory=list)
    """For each micro-batch the routing of each expert layer of this rank, if they were asked for."""

    def add(self, chunk: int, output: ModelOutput) -> None:
        """Add what one chunk made of one micro-batch."""
        parts = [output.loss_sum, *(_total(output.stats, name) for name in _LOSSES)]
        known = next((part for part in (*parts, output.hidden) if part is not None), None)
        assert known is not None
        zero = known.new_zeros((), dtype=torch.float64)
        loss = torch.stack([zero if part is None else part.detach().double() for part in parts])
        self.loss = loss if self.loss is None else self.loss + loss
        if output.stats:
            counts = torch.stack(
                [torch.stack([stats.routed, stats.dropped]) for stats in output.stats], dim=1
            )
            self._counts[chunk] = self._counts[chunk] + counts if chunk in self._counts else counts

    def counts(self) -> Int[Tensor, "2 L E"]:
        """Routed and dropped slots of this rank's expert layers, by chunk; `[2, 0, 0]` without any."""
        assert self.loss is not None
        held = [self._counts[chunk] for chunk in sorted(self._counts)]
        if held:
            return torch.cat(held, dim=1)
        return torch.zeros((2, 0, 0), dtype=torch.int64, device=self.loss.device)


def _total(stats: Sequence[RouterStats], name: str) -> Tensor | None:
    """The sum over layers of one loss; None without layers."""
    return sum((getattr(s, name) for s in stats[1:]), getattr(stats[0], name)) if stats else None


_LOSSES = ("aux_loss", "z_loss")


@dataclass(frozen=True, kw_only=True)
class Divisors:
    """What the sums of a step's losses are divided by, on the device: scalars in fp64.

    Tensors, so that a recorded step reads those of the step that plays it.
    """

    valid_labels: Tensor
    windows: Tensor
    real_tokens: Tensor

    @staticmethod
    def of(totals: StepTotals, device: torch.device) -> Divisors:
        """The counts of a step; nothing is copied from the host."""
        return Divisors(
            **{
                each.name: torch.full((), getattr(totals, each.name), dtype=torch.float64, device=device)
                for each in fields(Divisors)
            }
        )

    def fill_(self, totals: StepTotals) -> None:
        """Take the counts of another step."""
        for each in fields(self):
            getattr(self, each.name).fill_(getattr(totals, each.name))


def total_loss(output: ModelOutput, divisors: Divisors) -> Tensor | None:
    """What a micro-batch of one chunk adds to the step's loss: each sum divided by the step's count of it.

    `loss_sum / valid_labels + Σ aux_loss / windows + Σ z_loss / real_tokens` in fp64, the sums over the
    chunk's layers, so that each term is counted once over all stages; None from a chunk without any term.
    """
    sums = (output.loss_sum, *(_total(output.stats, name) for name in _LOSSES))
    by = (divisors.valid_labels, divisors.windows, divisors.real_tokens)
    terms = [total / divisor for total, divisor in zip(sums, by, strict=True) if total is not None]
    return sum(terms[1:], terms[0]) if terms else None


def run_microbatches(
    stage: Stage,
    batches: Sequence[Batch],
    divisors: Divisors,
    overrides: Overrides | None = None,
    *,
    keep_routings: bool = False,
) -> Sums:
    """Forward and backward of every micro-batch through this rank's chunks, in the order of the schedule.

    Args:
        stage: what this rank holds of the model.
        batches: this rank's micro-batches; all ranks of one pipeline have the same.
        divisors: counts of the whole step.
        overrides: routings to replay.
        keep_routings: note the routing of every expert layer of this rank.
    """
    sums = Sums()
    found: dict[tuple[int, int], Sequence[Routing]] = {}

    def visit(chunk: int, micro_batch: int, output: ModelOutput) -> None:
        sums.add(chunk, output)
        if keep_routings:
            found[micro_batch, chunk] = output.routings

    stage.train_on(batches, lambda output: total_loss(output, divisors), visit, overrides)
    if keep_routings:
        chunks = range(len(stage.chunks))
        sums.routings = [[r for c in chunks for r in found[m, c]] for m in range(len(batches))]
    return sums
