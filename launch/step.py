"""One optimiser step: micro-batches, one division of the loss, one reduction, one update; no files, no clock.

The trainer and verification share it. What the step divides by is known before the first forward, so that
neither the layout nor the split into micro-batches changes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.errors import NonFiniteError
from isozyme.models.types import ModelOutput
from isozyme.moe.expert_bias import update_expert_biases
from isozyme.moe.types import RouterStats, Routing
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, global_norm
from isozyme.parallel.process_groups import ProcessGroups


@runtime_checkable
class Updates(Protocol):
    """What a step needs of an optimiser."""

    def step(self, lr: float) -> None:
        """Update every parameter once from the reduced gradients."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did, the same on every rank (of one pipeline stage, for the counts of experts)."""

    totals: StepTotals
    loss: float
    """Mean cross-entropy in nats over all valid labels of the step; NaN if it had none."""
    aux_loss: float
    """Mean balance loss over all windows, coefficient included."""
    z_loss: float
    """Mean router z-loss over all real tokens, coefficient included."""
    grad_norm: float
    """Global norm before clipping."""
    clip: float
    """What every gradient was multiplied by; 1.0 if nothing was clipped."""
    routed: Int[Tensor, "L E"]
    """Slots that chose each expert of each mixture-of-experts layer, before capacity; on the CPU."""
    dropped: Int[Tensor, "L E"]
    """Slots that capacity dropped; on the CPU."""
    skipped: bool = False
    """Whether no label of the step was valid, so that all ranks left the weights alone."""

    @property
    def bits_per_base(self) -> float:
        """The loss in bits: `loss / ln 2`."""
        return self.loss / math.log(2)


@dataclass
class Sums:
    """Sums over this rank's micro-batches of one step (no gradients)."""

    loss: Tensor | None = None
    """[3] in fp64: cross-entropy, balance loss, z-loss."""
    routed: Tensor | None = None
    """[L, E] int64."""
    dropped: Tensor | None = None
    """[L, E] int64."""
    routings: list[Sequence[Routing]] = field(default_factory=list)
    """For each micro-batch the routing of each layer, if they were asked for."""

    def add(self, output: ModelOutput) -> None:
        """Add one micro-batch."""
        assert output.loss_sum is not None
        zero = output.loss_sum.new_zeros(())
        parts = [output.loss_sum, *(sum((getattr(s, n) for s in output.stats), zero) for n in _LOSSES)]
        loss = torch.stack([part.detach().double() for part in parts])
        self.loss = loss if self.loss is None else self.loss + loss
        routed, dropped = (_stack(output.stats, name, zero.device) for name in ("routed", "dropped"))
        self.routed = routed if self.routed is None else self.routed + routed
        self.dropped = dropped if self.dropped is None else self.dropped + dropped


_LOSSES = ("aux_loss", "z_loss")


def step_totals(local: StepTotals, groups: ProcessGroups, device: torch.device) -> StepTotals:
    """The counts of the whole step: the sum over dense replicas (the others hold the same windows).

    Args:
        local: counts of the windows that this rank's dense replica takes (as
            `isozyme.core.genome.windows.totals_of` says), whole windows under CP.
        groups: this rank's groups.
        device: one that the communicators can send from.
    """
    counts = torch.tensor([local.valid_labels, local.windows, local.real_tokens], device=device)
    valid, windows, real = groups["dp"].all_reduce(counts).tolist()
    return StepTotals(valid_labels=valid, windows=windows, real_tokens=real)


def total_loss(output: ModelOutput, totals: StepTotals) -> Tensor:
    """This micro-batch's share of the step's loss: each sum divided by the step's own count of its unit.

    `loss_sum / valid_labels + Σ aux_loss / windows + Σ z_loss / real_tokens`, the sums over the layers.
    """
    assert output.loss_sum is not None
    loss = output.loss_sum / totals.valid_labels
    for stats in output.stats:
        loss = loss + stats.aux_loss / totals.windows + stats.z_loss / totals.real_tokens
    return loss


class TrainStep:
    """One optimiser step over the micro-batches that it is given.

    Args:
        model: follows `isozyme.models.types.Model`, the whole of it on every pipeline (one chunk).
        buffer: gradients of the model's parameters.
        optimizer: updates the parameters from the buffer.
        groups: this rank's groups.
        clip: largest global gradient norm; 0 turns clipping off.
        expert_bias_rate: step of the balance bias of routers that have one.
    """

    def __init__(
        self,
        model: nn.Module,
        buffer: GradientBuffer,
        optimizer: Updates,
        groups: ProcessGroups,
        *,
        clip: float = 0.0,
        expert_bias_rate: float = 0.0,
    ) -> None:
        self.model = model
        self.buffer = buffer
        self.optimizer = optimizer
        self.groups = groups
        self.clip = clip
        self.expert_bias_rate = expert_bias_rate
        self._biased = [m for m in model.modules() if isinstance(getattr(m, "expert_bias", None), Tensor)]

    def __call__(
        self,
        batches: Sequence[Batch],
        totals: StepTotals,
        lr: float,
        overrides: Sequence[Sequence[Routing]] | None = None,
        on_gradients: Callable[[], None] | None = None,
    ) -> StepResult:
        """Accumulate, reduce, check, clip, update. Every rank of the world calls it together.

        Args:
            batches: this rank's micro-batches, on the device of the model.
            totals: counts of the whole step over all ranks (`step_totals`).
            lr: the learning rate of this step.
            overrides: for each micro-batch the routings to replay.
            on_gradients: called when gradients are reduced and clipped, before the update (for verification).

        Raises:
            NonFiniteError: on all ranks alike, before the update, if the loss or the gradient is not finite.
        """
        if totals.valid_labels == 0:
            return self._skip(totals)
        sums = self.accumulate(batches, totals, overrides)
        self.buffer.reduce()
        loss, routed, dropped = self._global_sums(sums)
        self._check_loss(loss, sums)
        norm = global_norm(self.buffer)
        coefficient = clip_(self.buffer, norm, self.clip)
        if on_gradients is not None:
            on_gradients()
        self.optimizer.step(lr)
        if self._biased and self.expert_bias_rate:
            assert sums.routed is not None
            update_expert_biases(self._biased, sums.routed.unbind(0), self.groups, rate=self.expert_bias_rate)
        return StepResult(
            totals=totals,
            loss=loss[0] / totals.valid_labels,
            aux_loss=loss[1] / totals.windows,
            z_loss=loss[2] / totals.real_tokens,
            grad_norm=norm,
            clip=coefficient,
            routed=routed,
            dropped=dropped,
        )

    def accumulate(
        self,
        batches: Sequence[Batch],
        totals: StepTotals,
        overrides: Sequence[Sequence[Routing]] | None = None,
        keep_routings: bool = False,
    ) -> Sums:
        """Forward and backward of every micro-batch into a fresh gradient buffer, not reduced yet."""
        self.buffer.zero()
        sums = Sums()
        for index, batch in enumerate(batches):
            output: ModelOutput = self.model(
                batch, routing_override=None if overrides is None else overrides[index]
            )
            total_loss(output, totals).backward()
            sums.add(output)
            if keep_routings:
                sums.routings.append(output.routings)
        return sums

    def _global_sums(self, sums: Sums) -> tuple[list[float], Tensor, Tensor]:
        """The step's sums over all ranks that hold a part of them."""
        assert sums.loss is not None
        assert sums.routed is not None
        assert sums.dropped is not None
        loss = self.groups["cp", "dp"].all_reduce(sums.loss.clone())
        counts = self.groups["tp", "cp", "dp"].all_reduce(torch.stack([sums.routed, sums.dropped]))
        routed, dropped = counts.cpu().unbind(0)
        return loss.tolist(), routed, dropped

    def _check_loss(self, loss: list[float], sums: Sums) -> None:
        """Refuse a loss that is not finite; every rank sees the same sum, and so raises alike."""
        if all(map(math.isfinite, loss)):
            return
        assert sums.loss is not None
        found = self.groups.world.all_gather_object(sums.loss.tolist())
        bad = [[n for n, x in zip(_NAMES, parts, strict=True) if not math.isfinite(x)] for parts in found]
        lines = [f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(bad) if names]
        raise NonFiniteError(
            "\n  - ".join(
                [f"the loss must be finite: {dict(zip(_NAMES, loss, strict=True))}. No weight was changed. "
                 "Not finite on", *lines]
            )
        )  # fmt: skip

    def _skip(self, totals: StepTotals) -> StepResult:
        """No valid label anywhere: nothing to learn from, on no rank."""
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


_NAMES = ("cross-entropy", "aux_loss", "z_loss")


def _stack(stats: Sequence[RouterStats], name: str, device: torch.device) -> Tensor:
    """`[L, E]` of one count; `[0, 0]` if the model has no experts."""
    if not stats:
        return torch.zeros((0, 0), dtype=torch.int64, device=device)
    return torch.stack([getattr(layer, name) for layer in stats])
