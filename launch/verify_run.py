"""Running a layout on simulated ranks, with the training step of the trainer, and keeping all that it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from isozyme.core.config import RunConfig
from isozyme.core.genome.windows import totals_of
from isozyme.core.topology import Layout, Topology
from isozyme.launch.step import StepResult, TrainStep, Updates, step_totals
from isozyme.launch.training_state import gradient_buffer, optimizer_of
from isozyme.launch.verify_compare import Kind, Piece, RankValues
from isozyme.launch.verify_reduced import Windows, skew_
from isozyme.launch.verify_routing import Flip, Key, Recorder, WindowRouting
from isozyme.launch.verify_tamper import Fault
from isozyme.models.stage import Stage, chunks_of, expert_layers
from isozyme.models.types import Chunk, ModelFactory
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups, World
from isozyme.parallel.shard_spec import ShardSpec, named_shards
from isozyme.parallel.simulated import simulate

STEPS = 3
SGD_LR = 0.1
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run the model: where, how exactly, and with which parts."""

    layout: Layout
    dtype: torch.dtype
    dispatcher: str
    experts: str
    plain: bool = False
    """Whether nothing is sharded, overlapped or recomputed, whatever the run says."""

    @property
    def exact(self) -> bool:
        """Whether correctness is decided here (fp64), rather than the rounding of a backend (fp32)."""
        return self.dtype == torch.float64

    def of(self, config: RunConfig) -> RunConfig:
        """The run at this setting, without what its dispatcher cannot do.

        A local one exchanges nothing, so it has no buffers to pad; equal tokens are for the all-gather one.
        """
        parts: dict[str, Any] = {"dispatcher": self.dispatcher, "experts": self.experts}
        if self.dispatcher != "allgather":
            parts["equal_tokens"] = False
        if self.dispatcher == "local":
            parts["pad_to_capacity"] = False
        if self.plain:
            optim = replace(config.optim, sharded=False, overlap_reduce=False, overlap_gather=False)
            config = replace(config, optim=optim, model=replace(config.model, recompute="none"))
        return replace(
            config,
            layout=self.layout,
            precision="fp64" if self.exact else "fp32",
            model=replace(config.model, moe=replace(config.model.moe, **parts)),
        )

    def lr(self, config: RunConfig) -> float:
        """The learning rate of every step."""
        return config.optim.lr if self.exact else SGD_LR


def reference_setting(dtype: torch.dtype) -> Setting:
    """One rank, nobody to talk to, one expert after the other."""
    return Setting(layout=Layout(dp=1), dtype=dtype, dispatcher="local", experts="loop", plain=True)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is run at every setting."""

    config: RunConfig
    """A reduced run."""
    factory: ModelFactory
    windows: Windows


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the ranks of one setting did."""

    values: Sequence[RankValues]
    routings: Sequence[Mapping[Key, WindowRouting]]
    """Of each rank."""
    flips: Sequence[Flip]
    """Found while a routing was replayed."""
    observed: bool
    """Whether the routers could say what they would have chosen."""


class PlainSGD:
    """`weight -= lr * gradient`: rounding stays rounding; Adam's first steps would turn it into signs."""

    def __init__(self, buffer: GradientBuffer) -> None:
        self.buffer = buffer

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter."""
        for segment in self.buffer.segments:
            segment.parameter.sub_(segment.parameter.main_grad * lr)  # type: ignore[attr-defined]


def observe(
    experiment: Experiment,
    setting: Setting,
    *,
    replay: Mapping[Key, WindowRouting] | None = None,
    fault: Fault | None = None,
) -> Observation:
    """Run three steps at one setting on simulated ranks.

    Args:
        experiment: model and data.
        setting: where and how.
        replay: routing of whole windows to use instead of the model's own.
        fault: what shall go wrong.
    """
    size = Topology(setting.layout).world_size
    seed = experiment.config.seed

    def program(world: World) -> tuple[RankValues, list[Recorder]]:
        return _Rank(experiment, setting, world, replay, fault).run()

    results = simulate(size, program, schedule_seed=seed, seed=seed)
    return Observation(
        values=[values for values, _ in results],
        routings=[
            {key: routing for recorder in recorders for key, routing in recorder.routings.items()}
            for _, recorders in results
        ],
        flips=[flip for _, recorders in results for recorder in recorders for flip in recorder.flips],
        observed=any(recorder.observed for _, recorders in results for recorder in recorders),
    )


class _Rank:
    """One rank of an observed run."""

    def __init__(
        self,
        experiment: Experiment,
        setting: Setting,
        world: World,
        replay: Mapping[Key, WindowRouting] | None,
        fault: Fault | None,
    ) -> None:
        self.setting, self.windows, self.fault = setting, experiment.windows, fault
        self.config = config = setting.of(experiment.config)
        world = fault.world(world) if fault is not None and fault.world is not None else world
        self.groups = groups = ProcessGroups(Topology(setting.layout), world)
        held = chunks_of(config, groups.topology.size("pp"), groups.coordinates["pp"])
        self.recorders = [
            Recorder(
                self._build(experiment.factory, chunk),
                groups,
                layers=None if groups["pp"].size == 1 else expert_layers(config.model, chunk),
                replay=replay,
                order=config.model.attention.context_order,
            )
            for chunk in held
        ]
        self.model = Stage(self.recorders, groups, config=config, dtype=setting.dtype, device=CPU)
        self.buffer = gradient_buffer(self.model, groups, config.optim)
        optimizer: Updates = (
            optimizer_of(self.model, self.buffer, config.optim) if setting.exact else PlainSGD(self.buffer)
        )
        self.step = TrainStep(
            self.model,
            self.buffer,
            optimizer,
            groups,
            clip=config.optim.clip,
            expert_bias_rate=config.model.moe.router.expert_bias_rate,
        )
        self.pieces: list[Piece] = []

    def run(self) -> tuple[RankValues, list[Recorder]]:
        """All steps, and what there is to compare."""
        results = [self._one_step(number) for number in range(STEPS)]
        self.step.finish()
        self._keep("weight", STEPS - 1, ((tensor, spec) for _, tensor, spec in named_shards(self.model)))
        values = RankValues(
            where=self._where(),
            rank=self.groups.rank,
            losses=[(result.loss, result.aux_loss, result.z_loss) for result in results],
            norms=[result.grad_norm for result in results],
            pieces=self.pieces,
        )
        return values, self.recorders

    def _where(self) -> str:
        """This rank, and its coordinates on the axes that have more than one."""
        at, topology = self.groups.coordinates, self.groups.topology
        axes = [f"{axis}={index}" for axis, index in at.items() if topology.size(axis) > 1]
        return f"rank {self.groups.rank} ({' '.join(axes)})" if axes else f"rank {self.groups.rank}"

    def _build(self, factory: ModelFactory, chunk: Chunk) -> nn.Module:
        config, fault, groups = self.config, self.fault, self.groups
        if fault is not None and fault.config is not None:
            config = fault.config(config, groups)
        model = factory(config, groups, chunk, CPU, self.setting.dtype)
        skew_(model, config.model)
        return model if fault is None or fault.model is None else fault.model(model, groups)

    def _one_step(self, number: int) -> StepResult:
        groups = self.groups
        indices = self.windows.of_rank(number, groups.coordinates["dp"], groups.topology.size("dp"))
        batches = [self.windows.batch(each) for each in indices]
        totals = step_totals(totals_of(batches), groups, CPU)
        for recorder in self.recorders:
            recorder.begin(indices)
        first = len(self.pieces)
        result = self.step(
            batches, totals, self.setting.lr(self.config), on_gradients=lambda: self._keep_gradients(number)
        )
        for piece in self.pieces[first:]:
            piece.tensor.div_(result.clip)  # an error of the norm shall not look like one of every gradient
        if self.fault is not None and self.fault.after_step is not None:
            self.step.finish()
            self.fault.after_step(self.model, groups)
        return result

    def _keep_gradients(self, number: int) -> None:
        self.buffer.gather()
        if number == 0 or self.setting.exact:
            segments = self.buffer.segments
            self._keep("gradient", number, ((s.parameter.main_grad, s.spec) for s in segments))  # type: ignore[attr-defined]

    def _keep(self, kind: Kind, number: int, tensors: Any) -> None:
        tensor: Tensor
        spec: ShardSpec
        for tensor, spec in tensors:
            self.pieces.append(
                Piece(
                    kind=kind,
                    step=number,
                    name=spec.name,
                    grid=spec.grid,
                    slices=spec.slices(self.groups.topology, self.groups.rank),
                    global_shape=spec.global_shape,
                    tensor=tensor.detach().clone(),
                )
            )
