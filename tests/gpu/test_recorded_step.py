"""Steps that replay a CUDA graph give the losses, norms, counts and weights of eager ones, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.batch import Batch
from isozyme.core.config import (
    ModelConfig,
    MoEConfig,
    OptimConfig,
    Precision,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from isozyme.core.errors import UsageError
from isozyme.core.genome.windows import totals_of
from isozyme.core.topology import Layout, Topology
from isozyme.launch.step import TrainStep, step_totals
from isozyme.launch.training_state import training_state
from isozyme.models.decoder import build_model
from isozyme.models.stage import Stage
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World
from tests.distributed.spawn import spawn
from tests.models.common import random_batch

STEPS, WINDOWS, LENGTH, VOCABULARY = 6, 4, 128, 64
MOE = MoEConfig(
    ffn=96,
    experts="grouped_mm_fused",
    router=RouterConfig(num_experts=4, topk=2, aux_loss=0.05, z_loss=0.01, expert_bias_rate=0.01),
)
GATHERED: dict[str, Any] = {"dispatcher": "allgather", "equal_tokens": True}
ON_TWO: dict[str, dict[str, Any]] = {
    "ep=2": {"layout": Layout(dp=2, ep=2), "moe": GATHERED},
    "ep=2, fixed sizes, a shared expert": {
        "layout": Layout(dp=2, ep=2),
        "moe": {"capacity_factor": 1.0, "pad_to_capacity": True, "shared_ffn": 64},
    },
    "dp=2, sharded": {"layout": Layout(dp=2), "optim": {"sharded": True, "overlap_reduce": True}},
    "dp=2, overlapped": {"layout": Layout(dp=2), "optim": {"overlap_reduce": True}, "micro_batch": 1},
    "tp=2": {"layout": Layout(tp=2, dp=1)},
    "cp=2": {"layout": Layout(cp=2, dp=1)},
    "etp=2": {"layout": Layout(dp=2, ep=1, etp=2), "moe": GATHERED},
}


def run_config(
    *,
    layout: Layout | None = None,
    moe: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    micro_batch: int = 2,
    recompute: str = "none",
    precision: Precision = "bf16",
) -> RunConfig:
    return RunConfig(
        device="cuda",
        precision=precision,
        layout=layout or Layout(dp=1),
        model=ModelConfig(
            vocab_size=VOCABULARY,
            hidden=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            recompute=recompute,  # type: ignore[arg-type]
            moe=replace(MOE, **(moe or {})),
        ),
        optim=OptimConfig(lr=1e-2, clip=0.5, **(optim or {})),
        train=TrainConfig(global_batch=WINDOWS, micro_batch=micro_batch),
    )


def windows(number: int, replica: int, size: int, micro_batch: int) -> Iterator[Batch]:
    """Unlike windows for each step and replica, with padding and labels that do not count."""
    for part in range(WINDOWS // size // micro_batch):
        seed = 100 * number + 10 * replica + part
        draw = torch.Generator().manual_seed(seed)
        real = torch.arange(LENGTH).expand(micro_batch, -1) < LENGTH - 10 * (seed % 3)
        valid = real & (torch.rand(micro_batch, LENGTH, generator=draw) < 0.5)
        batch = random_batch(micro_batch, LENGTH, VOCABULARY, seed, token_valid=real, label_valid=valid)
        if number % 2:  # a skewed routing
            batch = replace(batch, tokens=batch.tokens % 3)
        if number == STEPS - 2 and replica == part == 0:  # two documents on one rank: not replayed on any
            batch = replace(batch, documents=(torch.arange(LENGTH) > 50).long().expand(micro_batch, -1))
            batch = replace(batch, packed=True)
        yield batch


def train(config: RunConfig, world: World) -> list[Tensor | float]:
    """All that the steps of one rank give."""
    problems = config.problems()
    assert not problems, problems
    device = torch.device("cuda", world.rank)
    groups = ProcessGroups(Topology(config.layout), world)
    stage = Stage.build(build_model, config, groups, device, torch.bfloat16)
    buffer, optimizer = training_state(stage, groups, config.optim)
    step = TrainStep.of(config, stage, buffer, optimizer, groups)
    found: list[Tensor | float] = []
    at, size = groups.coordinates["dp"], groups.topology.size("dp")
    with closing(step):
        for number in range(STEPS):
            batches = list(windows(number, at, size, config.train.micro_batch))
            totals = step_totals(totals_of(batches), groups, device)
            result = step([batch.to(device) for batch in batches], totals, 1e-2)
            found += [
                result.loss,
                result.aux_loss,
                result.z_loss,
                result.grad_norm,
                result.routed,
                result.dropped,
            ]
    return [*found, *(p.detach().cpu() for p in stage.parameters())]


def same_bits(config: RunConfig, world: World) -> bool:
    """Whether recorded steps are those that run as always."""
    eager = train(config, world)
    recorded = train(replace(config, train=replace(config.train, cuda_graph=True)), world)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(eager, recorded, strict=True)
    )


def _on_two(world: World) -> dict[str, bool | str]:
    found: dict[str, bool | str] = {}
    for name, case in ON_TWO.items():
        try:
            found[name] = same_bits(run_config(**case), world)
        except Exception as error:  # so that the other cases are seen too
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_replayed_steps_on_one_gpu_give_the_bits_of_eager_ones(recompute: str) -> None:
    assert same_bits(run_config(recompute=recompute, micro_batch=2), SingleWorld())


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [False, True])
def test_replayed_steps_in_row_wise_fp8_give_the_bits_of_eager_ones(cache: bool) -> None:
    """With kept weights too: they are quantised in each replay, by the recorded step's first micro-batch."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("torch's scaled grouped product is built for Hopper")
    moe = {"experts": "grouped_fp8", "cache_quantized_weights": cache}
    assert same_bits(run_config(precision="fp8_rowwise", moe=moe), SingleWorld())


@pytest.mark.gpu
def test_what_waits_for_the_host_is_refused_with_the_reason() -> None:
    config = run_config()
    stage = Stage.build(
        build_model,
        replace(config, model=replace(config.model, moe=replace(config.model.moe, experts="grouped_mm"))),
        ProcessGroups(Topology(config.layout), SingleWorld()),
        torch.device("cuda"),
        torch.bfloat16,
    )
    groups = stage.groups
    buffer, optimizer = training_state(stage, groups, config.optim)
    with pytest.raises(UsageError, match=r"moe: the backend reads row counts on the host: grouped_mm"):
        TrainStep(stage, buffer, optimizer, groups, cuda_graph=True)


@pytest.mark.gpu(2)
def test_replayed_steps_on_two_gpus_give_the_bits_of_eager_ones() -> None:
    assert spawn(_on_two, 2, device="cuda", timeout=170) == [dict.fromkeys(ON_TWO, True)] * 2
