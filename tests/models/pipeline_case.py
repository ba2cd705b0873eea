"""Two optimiser steps of a small decoder in fp64, on one rank or in a pipeline, and what must be equal.

The windows are unlike: padding, two documents, labels that do not count, one that is padding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import OptimConfig, RunConfig, TrainConfig
from isozyme.core.genome.schedule import step_indices
from isozyme.core.genome.windows import totals_of
from isozyme.core.pipeline import PipelineConfig
from isozyme.core.topology import Layout, Topology
from isozyme.launch.evaluate import evaluate
from isozyme.launch.step import StepResult, TrainStep, step_totals
from isozyme.launch.training_state import training_state
from isozyme.models.decoder import build_model
from isozyme.models.stage import Stage
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World
from isozyme.parallel.shard_spec import named_shards
from tests.models.common import CPU, random_batch, tiny

STEPS, WINDOWS = 2, 8
"""The second step starts from weights, moments and biases that the first has changed."""
Change = Callable[[nn.Module, ProcessGroups], nn.Module]
"""Changes or wraps a chunk that a rank has built."""


def run_config(*, tied: bool = False, layout: Layout | None = None, **pipeline: Any) -> RunConfig:
    """Eight micro-batches of one window (fewer on each of several replicas), all kinds of losses."""
    config = tiny(tied=tied, num_layers=5, pattern="MDM", vocab_size=38)
    router = replace(config.model.moe.router, aux_loss=0.05, z_loss=0.01, expert_bias_rate=0.01)
    return replace(
        config,
        layout=layout or Layout(dp=1),
        pipeline=PipelineConfig(**pipeline),
        model=replace(config.model, moe=replace(config.model.moe, router=router)),
        optim=OptimConfig(lr=1e-2, clip=0.5),
        train=TrainConfig(global_batch=WINDOWS, micro_batch=1),
    )


def window(index: int) -> Batch:
    """The window of an index, and nothing else, decides what is in it."""
    within = index % WINDOWS
    real = torch.arange(16)[None] < (0 if within == 5 else 16 - 3 * (within % 3))
    documents = (torch.arange(16)[None] >= 7).long() * (within % 2)
    batch = random_batch(1, seed=100 + index, token_valid=real, documents=documents, packed=True)
    valid = torch.rand(1, 16, generator=torch.Generator().manual_seed(index)) < 0.3 + 0.08 * within
    return replace(batch, label_valid=real & valid)


@dataclass
class Seen:
    """What one rank did in all steps."""

    results: list[StepResult]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    """And buffers."""
    slices: dict[str, tuple[slice, ...]]
    held_out: float


def train(config: RunConfig, world: World, change: Change | None = None, device: torch.device = CPU) -> Seen:
    """All steps of one rank, and an evaluation."""
    groups = ProcessGroups(Topology(config.layout), world)
    stage = Stage.build(build_model, config, groups, device, torch.float64)
    if change is not None:
        stage.chunks = nn.ModuleList([change(chunk, groups) for chunk in stage.chunks])
    buffer, optimizer = training_state(stage, groups, config.optim)
    step = TrainStep.of(config, stage, buffer, optimizer, groups)
    at, size = groups.coordinates["dp"], groups.topology.size("dp")
    seen = Seen([], [], {}, {}, 0.0)
    batches: list[Batch] = []
    for number in range(STEPS):
        found: dict[str, Tensor] = {}

        def keep(found: dict[str, Tensor] = found) -> None:
            buffer.gather()
            for segment in buffer.segments:
                found[segment.spec.name] = segment.parameter.main_grad.cpu().clone()  # type: ignore[attr-defined]

        batches = [window(i).to(device) for (i,) in step_indices(number, WINDOWS, at, size, 1)]
        totals = step_totals(totals_of(batches), groups, device)
        seen.results.append(step(batches, totals, config.optim.lr, on_gradients=keep))
        seen.gradients.append(found)
    step.finish()
    for name, tensor, spec in named_shards(stage):
        seen.weights[name] = tensor.detach().cpu().clone()
        seen.slices[name] = spec.slices(groups.topology, groups.rank)
    seen.held_out = evaluate(stage, batches, groups, device).bits_per_base
    return seen


@cache
def one_rank(tied: bool) -> Seen:
    return train(run_config(tied=tied), SingleWorld())


def near(found: Tensor, expected: Tensor, norm: float, name: str) -> None:
    error = (found - expected).norm() / max(float(expected.norm()), 1e-6 * norm)
    assert error <= 1e-9, f"{name}: {error:.1e}"


def assert_equals_one_rank(seen: list[Seen], reference: Seen) -> None:
    """Every rank's losses, counts, norm, gradients and weights; together they hold the whole model."""
    for of_rank in seen:
        for step, (found, expected) in enumerate(zip(of_rank.results, reference.results, strict=True)):
            for name in ("loss", "aux_loss", "z_loss", "grad_norm", "clip"):
                value = getattr(expected, name)
                assert getattr(found, name) == pytest.approx(value, rel=1e-9), (step, name)
            assert torch.equal(found.routed, expected.routed)
            assert found.totals == expected.totals
            for name, gradient in of_rank.gradients[step].items():
                part = reference.gradients[step][name][of_rank.slices[name]]
                near(gradient, part, expected.grad_norm, f"step {step}, gradient of {name}")
        for name, weight in of_rank.weights.items():
            near(weight, reference.weights[name][of_rank.slices[name]], 1.0, f"weight {name}")
        assert of_rank.held_out == pytest.approx(reference.held_out, rel=1e-9)
    assert set().union(*(of_rank.weights for of_rank in seen)) == set(reference.weights)
