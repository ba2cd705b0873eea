"""One optimiser step: micro-batches, one division of the loss, one reduction, one update; no files, no clock.

The trainer and verification share it. What the step divides by is known before the first forward, so that
neither the layout nor the split into micro-batches changes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.config import RunConfig
from isozyme.core.errors import NonFiniteError
from isozyme.launch.microbatches import Divisors, Sums, run_microbatches
from isozyme.launch.recorded import Gradients, RecordedGradients
from isozyme.launch.step_result import StepResult as StepResult
from isozyme.launch.training_state import refuse_replaced
from isozyme.models.stage import Overrides, Stage
from isozyme.moe.expert_bias import update_expert_biases
from isozyme.moe.lagged_counts import update_lagged_counts
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.grad_norm import clip_, clip_coefficient, norm_of, squared_norm
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups


@runtime_checkable
class Updates(Protocol):
    """What a step needs of an optimiser."""

    def step(self, lr: float) -> None:
        """Update every parameter once from the reduced gradients."""
        ...


def step_totals(local: StepTotals, groups: ProcessGroups, device: torch.device) -> StepTotals:
    """The counts of the whole step: the sum over dense replicas (the others hold the same windows).

    Args:
        local: counts of the windows that this rank's dense replica takes (as
            `isozyme.core.genome.windows.totals_of` says), whole windows under CP.
        groups: this rank's groups.
        device: one that the communicators can send from.
    """
    counts = torch.tensor(list(asdict(local).values()), device=device)
    names = (field.name for field in fields(StepTotals))
    return StepTotals(**dict(zip(names, groups["dp"].all_reduce(counts).tolist(), strict=True)))


class TrainStep:
    """One optimiser step over the micro-batches that it is given.

    Args:
        model: this rank's `Stage`; or the whole model, which follows `isozyme.models.types.Model`.
        buffer: gradients of the model's parameters.
        optimizer: updates the parameters from the buffer.
        groups: this rank's groups.
        clip: largest global gradient norm; 0 turns clipping off.
        expert_bias_rate: step of the balance bias of routers that have one.
        cuda_graph: record forward, backward and reduction once, and replay them in later steps.

    Raises:
        UsageError: if the step of this model cannot be recorded; every reason is listed.
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
        cuda_graph: bool = False,
    ) -> None:
        self.stage = model if isinstance(model, Stage) else Stage([model], groups)
        self.buffer = buffer
        self.optimizer = optimizer
        self.groups = groups
        self.clip = clip
        self.expert_bias_rate = expert_bias_rate
        self._biased, self._lagged = (
            [module for module in model.modules() if isinstance(getattr(module, buffer, None), Tensor)]
            for buffer in ("expert_bias", "lagged_counts")
        )
        self._recorded = RecordedGradients(self._gradients, self.stage, buffer) if cuda_graph else None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        model: nn.Module,
        buffer: GradientBuffer,
        optimizer: Updates,
        groups: ProcessGroups,
    ) -> TrainStep:
        """The step that a run's configuration says."""
        return cls(
            model,
            buffer,
            optimizer,
            groups,
            clip=config.optim.clip,
            expert_bias_rate=config.model.moe.router.expert_bias_rate,
            cuda_graph=config.train.cuda_graph,
        )

    def __call__(
        self,
        batches: Sequence[Batch],
        totals: StepTotals,
        lr: float,
        overrides: Overrides | None = None,
        on_gradients: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepResult:
        """Accumulate, reduce, check, clip, update. Every rank of the world calls it together.

        Args:
            batches: this rank's micro-batches, on the device of the model.
            totals: counts of the whole step over all ranks (`step_totals`).
            lr: the learning rate of this step.
            overrides: for each micro-batch the routings to replay in this rank's expert layers.
            on_gradients: called when gradients are reduced and clipped, before the update (for verification).
            meanwhile: called on the host once, while the device computes the gradients; not by a step that
                is skipped.

        Raises:
            NonFiniteError: on all ranks alike, before the update, if the loss or the gradient is not finite.
            UsageError: before the update, if parameters of the model were replaced since the buffer was made,
                or if the step is to be recorded and these micro-batches cannot be (`RecordedGradients`).
        """
        if totals.valid_labels == 0:
            return StepResult.without_labels(totals)
        if self._recorded is None:
            found = self._gradients(batches, Divisors.of(totals, batches[0].tokens.device), overrides)
        else:
            found = self._recorded(batches, totals, overrides)
        refuse_replaced(self.stage, self.buffer)
        if meanwhile is not None:
            meanwhile()
        sums = found.sums
        *loss, squared = found.numbers.tolist()
        routed, dropped = found.counts.cpu().unbind(0)  # now: later it would wait for the update
        self._check_loss(loss, sums)
        norm = norm_of(self.buffer, squared)
        coefficient = self._update_weights(norm, lr, on_gradients)
        self._update_buffers(sums)
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

    def finish(self) -> None:
        """Return when parameters are whole, before anyone reads them other than by a forward pass.

        The last update may have left gathers under way (`optim.overlap_gather`). All ranks call it together.
        """
        if isinstance(self.optimizer, Optimizer):
            self.optimizer.finish()

    def close(self) -> None:
        """Give up what was recorded. It comes before communicators end, which wait for it for ever."""
        if self._recorded is not None:
            self._recorded.close()

    def accumulate(
        self,
        batches: Sequence[Batch],
        totals: StepTotals,
        overrides: Overrides | None = None,
        keep_routings: bool = False,
    ) -> Sums:
        """Forward and backward of every micro-batch into a fresh gradient buffer, not reduced yet."""
        divisors = Divisors.of(totals, batches[0].tokens.device)
        return self._accumulate(batches, divisors, overrides, keep_routings)

    def _accumulate(
        self,
        batches: Sequence[Batch],
        divisors: Divisors,
        overrides: Overrides | None,
        keep_routings: bool = False,
    ) -> Sums:
        self.buffer.zero()
        self.buffer.expect(len(batches))
        return run_microbatches(self.stage, batches, divisors, overrides, keep_routings=keep_routings)

    def _gradients(
        self, batches: Sequence[Batch], divisors: Divisors, overrides: Overrides | None = None
    ) -> Gradients:
        """Everything of a step that comes before its first look at a number."""
        sums = self._accumulate(batches, divisors, overrides)
        self.buffer.reduce()
        assert sums.loss is not None
        parts = sums.loss.clone()
        if self.groups.coordinates["tp"] > 0:
            # Every TP rank has the cross-entropy of all their tokens, and the other losses of its own.
            parts[:1].zero_()
        world = self.groups.world
        return Gradients(
            sums=sums,
            numbers=world.all_reduce(torch.cat([parts, squared_norm(self.buffer).to(parts.device)])),
            counts=world.all_reduce(self._in_whole_model(sums.counts())),
        )

    def _update_weights(self, norm: float, lr: float, on_gradients: Callable[[], None] | None) -> float:
        """Clip and update, in one pass if nobody looks at the gradients between; returns the coefficient."""
        if on_gradients is None and isinstance(self.optimizer, Optimizer):
            coefficient = clip_coefficient(norm, self.clip)
            self.optimizer.step(lr, coefficient)
            return coefficient
        coefficient = clip_(self.buffer, norm, self.clip)
        if on_gradients is not None:
            on_gradients()
        self.optimizer.step(lr)
        return coefficient

    def _update_buffers(self, sums: Sums) -> None:
        """Move the balance biases, and note the counts for the next step, where routers have them."""
        if self._biased and self.expert_bias_rate:
            own = sums.counts()[0].unbind(0)
            update_expert_biases(self._biased, own, self.groups, rate=self.expert_bias_rate)
        if self._lagged:
            update_lagged_counts(self._lagged, sums.counts()[0].unbind(0), self.groups)

    def _in_whole_model(self, counts: Int[Tensor, "2 L_own E_own"]) -> Int[Tensor, "2 L E"]:
        """This rank's counts at the places of its layers among those of all stages; zeros elsewhere."""
        stage = self.stage
        if stage.expert_layers is None:
            return counts
        whole = counts.new_zeros((2, stage.num_expert_layers, stage.num_experts))
        places = [layer for layers in stage.expert_layers for layer in layers]
        if places:
            whole[:, places] = counts
        return whole

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


_NAMES = ("cross-entropy", "aux_loss", "z_loss")
