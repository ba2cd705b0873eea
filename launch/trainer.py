"""The training loop of one rank: build or resume, step, look, save, and say at the end what came of it.

The loop holds no state but the number of the step: windows, totals and learning rate are pure functions of
it, so that a resumed run makes the same steps as one that was never interrupted.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.genome.dataset import GenomeData
from isozyme.core.genome.schedule import step_indices
from isozyme.launch.evaluate import Evaluation, chosen_windows, evaluate, held_out_batches
from isozyme.launch.metrics import MetricsLog, peak_memory_bytes, step_record
from isozyme.launch.prepare import Preparation, Prepared
from isozyme.launch.progress import Display
from isozyme.launch.report import Summary, closing_table, count, grouped_choices
from isozyme.launch.requirements import Choice
from isozyme.launch.resume import Checkpoints
from isozyme.launch.step import StepResult, TrainStep
from isozyme.launch.stop import StopRequest, stop_on_signals
from isozyme.launch.training_state import gradient_choice, training_state
from isozyme.models.stage import Stage
from isozyme.models.types import ModelFactory
from isozyme.parallel.lr_schedule import learning_rate
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.weights import save_weights

WEIGHTS, METRICS = "weights.safetensors", "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a rank needs to train, all of it checked."""

    config: RunConfig
    groups: ProcessGroups
    device: torch.device
    choice: Choice
    folder: Path
    data: GenomeData
    model: str | None = None
    """`package.module:factory` that builds it; None for the package's decoder."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for all."""
        return self.groups.world.rank == 0

    @property
    def has_results(self) -> bool:
        """Whether a run has written into the folder before."""
        return any((self.folder / name).exists() for name in (WEIGHTS, METRICS))


@dataclass
class Progress:
    """What the steps of this process added up to."""

    done: int
    """Optimiser steps done, those before a resume included."""
    last: StepResult | None = None
    speeds: list[float] = field(default_factory=list)
    """Real tokens a second of each step, all ranks together."""
    routed: Tensor | None = None
    dropped: int = 0

    def add(self, result: StepResult, seconds: float) -> None:
        """Count one step."""
        self.done += 1
        if result.skipped:
            return
        self.last = result
        self.speeds.append(result.totals.real_tokens / seconds)
        self.routed = result.routed if self.routed is None else self.routed + result.routed
        self.dropped += int(result.dropped.sum())


def train_rank(run: Run, factory: ModelFactory) -> Callable[[], int]:
    """Train on this rank, together with all others.

    Args:
        run: the run.
        factory: builds the model.

    Returns:
        What is left to do when the ranks have parted: the closing report of rank 0 (nothing on the others),
        which gives the exit code.

    Raises:
        IsozymeError: as its parts do; `NonFiniteError` on all ranks alike.
    """
    config = run.config
    torch.manual_seed(config.seed)
    model = Stage.build(factory, config, run.groups, run.device, run.choice.dtype)
    buffer, optimizer = training_state(model, run.groups, config.optim)
    checkpoints = Checkpoints(run.folder, config, run.data.genome.sha256, model, optimizer, run.groups)
    start, messages = checkpoints.resume()
    step = TrainStep.of(config, model, buffer, optimizer, run.groups)
    heading = [*_heading(run, model), *messages]
    metrics = MetricsLog(run.folder / METRICS if run.is_leader else None, start)
    display = Display(shown=run.is_leader, total=config.train.steps, start=start)
    for message in heading:
        display.say(message)
    with closing(step), display, stop_on_signals(run.groups.world) as stop:
        loop = _Loop(run, step, checkpoints, metrics, display, stop)
        progress, stopped = loop.run(start)
        if stopped is not None:
            return lambda: _stopped(stopped, progress.done, display)
        # Before the evaluation, which may take long: an interrupt there must not lose what was learned.
        save_weights(
            run.folder / WEIGHTS,
            model,
            run.groups,
            metadata={
                "config": asdict(config),
                "step": progress.done,
                "genome_sha256": run.data.genome.sha256,
                "model": run.model,
            },
        )
    result = evaluate(model, _held_out(run), run.groups, run.device)
    choices = {
        **grouped_choices(model.choices),
        "optimiser": str(optimizer.choice),
        **gradient_choice(buffer, config.optim),
    }
    memory = peak_memory_bytes(run.device)
    return lambda: _close(run, progress, result, choices, memory, metrics, display)


class _Loop:
    """The steps of one process."""

    def __init__(
        self,
        run: Run,
        step: TrainStep,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        display: Display,
        stop: StopRequest,
    ) -> None:
        self.run_ = run
        self.step = step
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.display = display
        self.stop = stop
        self._prepare = Preparation(run.groups, run.device)
        self._next: tuple[int, Prepared] | None = None
        """What was prepared ahead, and for which step."""

    def run(self, start: int) -> tuple[Progress, int | None]:
        """Go on from step `start`; returns what was done, and the signal that ended it early if one did."""
        train = self.run_.config.train
        progress = Progress(done=start)
        for number in range(start, train.steps):
            self._one_step(number, progress)
            if train.eval_every and progress.done % train.eval_every == 0 and progress.done < train.steps:
                self._evaluate(progress.done)
            stopped = self.stop.agreed()
            if stopped is not None or (
                train.checkpoint_every and progress.done % train.checkpoint_every == 0
            ):
                self.checkpoints.save(progress.done)
            if stopped is not None and progress.done < train.steps:
                return progress, stopped
        self.step.finish()
        return progress, None

    def _one_step(self, number: int, progress: Progress) -> None:
        run, train = self.run_, self.run_.config.train
        began = time.perf_counter()
        lr = learning_rate(number, run.config.optim, train.steps)
        given = self._prepared(number)
        totals = given.totals
        result = self.step(given.batches(), totals, lr, meanwhile=partial(self._prepare_ahead, number + 1))
        seconds = time.perf_counter() - began
        progress.add(result, seconds)
        logged = progress.done % train.log_every == 0 or progress.done in (1, train.steps)
        if logged:
            memory = peak_memory_bytes(run.device)
            ranks = run.groups.world.size
            self.metrics.write(
                step_record(number, result, lr=lr, seconds=seconds, ranks=ranks, memory_bytes=memory)
            )
        speed = totals.real_tokens / seconds
        self.display.step(number, result, lr=lr, tokens_per_s=speed, logged=logged)

    def _prepared(self, number: int) -> Prepared:
        if self._next is not None and self._next[0] == number:
            return self._next[1]
        return self._prepare(list(_train_batches(self.run_, number)))

    def _prepare_ahead(self, number: int) -> None:
        """Read and send the windows of a step while the device works on the step before."""
        if number < self.run_.config.train.steps:
            self._next = number, self._prepare(list(_train_batches(self.run_, number)))

    def _evaluate(self, done: int) -> None:
        run = self.run_
        self.step.finish()
        result = evaluate(self.step.stage, _held_out(run), run.groups, run.device)
        self.metrics.write({"kind": "eval", "step": done - 1, **asdict(result)})
        self.display.say(f"held-out after step {done}: {result.bits_per_base:.4f} bits per base")


def _train_batches(run: Run, step: int) -> Iterator[Batch]:
    """This rank's micro-batches of one step, on the CPU."""
    dp_rank, dp_size = run.groups.coordinates["dp"], run.groups.topology.size("dp")
    train = run.config.train
    for indices in step_indices(step, train.global_batch, dp_rank, dp_size, train.micro_batch):
        yield run.data.train_batch(indices)


def _held_out(run: Run) -> Iterator[Batch]:
    train = run.config.train
    chosen = chosen_windows(len(run.data.held_out), train.eval_windows)
    return held_out_batches(run.data.held_out, chosen, run.groups, train.micro_batch)


def _stopped(number: int, done: int, display: Display) -> int:
    """The last line of a run that a signal ended early, and its exit code."""
    name = signal.Signals(number).name
    display.say(f"stopped by {name} after step {done}; resume=latest goes on from there")
    return 128 + number if number == signal.SIGINT else 0


def _heading(run: Run, model: nn.Module) -> list[str]:
    """What a run says of itself before its first step."""
    config, data = run.config, run.data
    local = sum(parameter.numel() for parameter in model.parameters())
    train, held_out = (
        sum(region.length for region in part) for part in (data.split.train, data.split.held_out)
    )
    ranks = count(run.groups.world.size, "rank")
    return [
        f"{config.name}: {ranks} ({run.groups.topology.layout}), {config.precision}, "
        f"{run.choice.device} ({run.choice.why_device}); {local:,} parameters on rank 0",
        f"{data.genome.source}: {train:,} bases to learn from, {held_out:,} held out "
        f"({100 * data.split.share:.1f} %, {data.split.manner})",
        f"results in {run.folder}"
        + (", in place of an earlier run's" if config.resume is None and run.has_results else ""),
    ]


def _close(
    run: Run,
    progress: Progress,
    result: Evaluation,
    choices: Mapping[str, str],
    memory: int,
    metrics: MetricsLog,
    display: Display,
) -> int:
    """The closing report; only rank 0 has one. The Markov baseline is counted here, while nobody waits."""
    if not run.is_leader:
        return 0
    chosen = chosen_windows(len(run.data.held_out), run.config.train.eval_windows)
    markov = run.data.markov(chosen)
    metrics.write(
        {
            "kind": "final",
            "step": progress.done - 1,
            **asdict(result),
            "markov_bits_per_base": markov.bits_per_base,
            "markov_order": markov.order,
        }
    )
    none = torch.zeros((0, 0), dtype=torch.int64)
    summary = Summary(
        name=run.config.name,
        steps=progress.done,
        ranks=run.groups.topology.world_size,
        layout=str(run.groups.topology.layout),
        loss=progress.last.loss if progress.last is not None else None,
        evaluation=result,
        markov=markov,
        tokens_per_s=statistics.median(progress.speeds) if progress.speeds else 0.0,
        routed=progress.routed if progress.routed is not None else none,
        dropped=progress.dropped,
        memory_bytes=memory,
        choices={**choices, "device": f"{run.choice.device} ({run.choice.why_device})"},
    )
    display.console.print(closing_table(summary))
    display.say(f"weights: {run.folder / WEIGHTS}; metrics: {run.folder / METRICS}")
    return 0
