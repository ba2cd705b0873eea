"""The decoder cut into pipeline stages against the same decoder on one rank."""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError, UsageError
from isozyme.core.topology import Layout, Topology
from isozyme.models.decoder import build_model
from isozyme.models.stage import Stage, chunks_of, expert_layers
from isozyme.models.types import ModelOutput
from isozyme.moe.types import Routing
from isozyme.parallel.checkpoint import load_checkpoint, save_checkpoint
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups, World
from isozyme.parallel.shard_spec import named_shards
from isozyme.parallel.simulated import SimulatedWorld, simulate
from isozyme.parallel.trace import Trace
from isozyme.parallel.weights import load_weights, save_weights
from tests.distributed.spawn import spawn
from tests.models.common import CPU, single_groups
from tests.models.pipeline_case import (
    STEPS,
    Change,
    Seen,
    assert_equals_one_rank,
    one_rank,
    run_config,
    train,
    window,
)

# Whole training steps; annotations are checked where the parts are tested.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")

INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
CASES = [
    pytest.param(Layout(pp=2, dp=1), {"schedule": "gpipe"}, True, id="pp=2 gpipe tied"),
    pytest.param(Layout(pp=4, dp=1), {}, False, id="pp=4"),
    pytest.param(Layout(pp=2, dp=2, ep=2), INTERLEAVED, True, id="pp=2 dp=2 ep=2 chunks=2 tied"),
    pytest.param(Layout(pp=2, dp=2, ep=2), INTERLEAVED, False, id="pp=2 dp=2 ep=2 chunks=2"),
    pytest.param(Layout(pp=2, dp=1), {"split": (4, 1)}, False, id="pp=2 split"),
    pytest.param(Layout(pp=4, dp=1), {"split": (0, 3, 2, 0)}, True, id="pp=4 ends alone tied"),
]
"""Splits, schedules and tying. Pipelines along with every other axis are in tests/equivalence."""


def pipeline_run(
    config: RunConfig, *, schedule_seed: int = 0, change: Change | None = None
) -> tuple[list[Seen], Trace]:
    def rank(world: SimulatedWorld) -> Seen:
        return train(config, world, change)

    config.validate()
    size = Topology(config.layout).world_size
    return simulate(size, rank, schedule_seed=schedule_seed, trace=True)


@pytest.mark.parametrize(("layout", "pipeline", "tied"), CASES)
def test_a_pipeline_makes_the_steps_of_one_rank(layout: Layout, pipeline: dict[str, Any], tied: bool) -> None:
    seen, _ = pipeline_run(run_config(tied=tied, layout=layout, **pipeline))
    assert_equals_one_rank(seen, one_rank(tied))


def test_every_kind_of_loss_and_the_clipping_have_a_say() -> None:
    for result in one_rank(tied=True).results:
        assert result.clip < 1
        assert result.aux_loss > 0.01
        assert result.z_loss > 0.001
    biases = [weight for name, weight in one_rank(tied=True).weights.items() if "expert_bias" in name]
    assert len(biases) == 3
    assert all(bias.any() for bias in biases)


def test_both_ends_hold_the_same_tied_embedding_from_the_start_to_the_end() -> None:
    config = run_config(tied=True, layout=Layout(pp=3, dp=1))

    def rank(world: World) -> dict[str, Tensor]:
        groups = ProcessGroups(Topology(config.layout), world)
        stage = Stage.build(build_model, config, groups, CPU, torch.float64)
        return {name: tensor.detach() for name, tensor, _ in named_shards(stage)}

    start = simulate(3, rank)
    assert ["embedding.weight" in held for held in start] == [True, False, True]
    assert torch.equal(start[0]["embedding.weight"], start[2]["embedding.weight"])
    (first, _, last), _ = pipeline_run(config)
    assert torch.equal(first.weights["embedding.weight"], last.weights["embedding.weight"])
    assert not torch.equal(first.weights["embedding.weight"], start[0]["embedding.weight"])


@cache
def _expected(interleaved: bool) -> list[Seen]:
    return pipeline_run(_spread(interleaved))[0]


def _spread(interleaved: bool) -> RunConfig:
    return run_config(layout=Layout(pp=2, dp=2, ep=2), **(INTERLEAVED if interleaved else {}))


@pytest.mark.parametrize("interleaved", [False, True], ids=["1f1b", "interleaved"])
@pytest.mark.parametrize("schedule_seed", [1, 2])
def test_whoever_runs_first_no_bit_changes_and_nobody_waits_forever(
    interleaved: bool, schedule_seed: int
) -> None:
    seen, trace = pipeline_run(_spread(interleaved), schedule_seed=schedule_seed)
    for found, expected in zip(seen, _expected(interleaved), strict=True):
        assert found.weights.keys() == expected.weights.keys()
        assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.weights.items())
    # The ranks of one stage make the same calls; what one stage sends, the other receives.
    assert trace.kinds(0) == trace.kinds(1)
    assert trace.kinds(2) == trace.kinds(3)
    for here, there in ((0, 2), (1, 3), (2, 0), (3, 1)):
        sent = [record.shape for record in trace[here] if record.kind == "send"]
        assert sent == [record.shape for record in trace[there] if record.kind == "recv"]
        assert sent


def test_one_rank_sends_nothing() -> None:
    _, trace = pipeline_run(run_config(layout=Layout(dp=2)))
    assert not {"send", "recv"} & {record.kind for records in trace for record in records}


def test_each_micro_batch_crosses_each_border_once_in_each_direction() -> None:
    config = run_config(layout=Layout(pp=2, dp=1), **INTERLEAVED)
    _, trace = pipeline_run(config)
    sends = [record for records in trace for record in records if record.kind == "send"]
    borders, micro_batches = 2 * 2 - 1, 8
    # Training steps, there and back; one evaluation, there.
    assert len(sends) == (STEPS * 2 + 1) * borders * micro_batches
    assert {record.group for record in sends} == {"pp"}
    assert {record.bytes_sent for record in sends} == {1 * 16 * config.model.hidden * 8}


@pytest.mark.parametrize(
    ("before", "after", "tied"),
    [
        pytest.param(Layout(dp=1), Layout(pp=4, dp=1), True, id="one rank to pp=4, tied"),
        pytest.param(Layout(pp=2, dp=2, ep=2), Layout(dp=1), True, id="pp=2 dp=2 ep=2 to one rank, tied"),
        pytest.param(Layout(pp=2, dp=2, ep=2), Layout(pp=4, dp=1), False, id="pp=2 dp=2 ep=2 to pp=4"),
    ],
)
def test_checkpoints_and_weights_go_from_any_pipeline_to_any_other(
    tmp_path: Path, before: Layout, after: Layout, tied: bool
) -> None:
    expected = one_rank(tied)

    def of_rank(world: World, layout: Layout, seed: int) -> tuple[ProcessGroups, Stage, Optimizer]:
        groups = ProcessGroups(Topology(layout), world)
        config = replace(run_config(tied=tied, layout=layout), seed=seed)
        stage = Stage.build(build_model, config, groups, CPU, torch.float64)
        return groups, stage, Optimizer(GradientBuffer(stage.parameters(), groups), config.optim)

    def save(world: World) -> None:
        groups, stage, optimizer = of_rank(world, before, seed=3)
        for name, tensor, spec in named_shards(stage):
            tensor.data.copy_(expected.weights[name][spec.slices(groups.topology, groups.rank)])
        for name, tensor, _ in optimizer.state():
            tensor.fill_(_mark(name))
        save_checkpoint(tmp_path, 1, [*named_shards(stage), *optimizer.state()], groups)
        save_weights(tmp_path / "weights.safetensors", stage, groups)

    def load(world: World) -> None:
        groups, stage, optimizer = of_rank(world, after, seed=4)
        load_checkpoint(tmp_path / "step_00000001", [*named_shards(stage), *optimizer.state()], groups)
        _, exported, _ = of_rank(world, after, seed=5)
        load_weights(tmp_path / "weights.safetensors", exported, groups)
        for name, tensor, _ in optimizer.state():
            assert (tensor == _mark(name)).all(), name
        for held in (stage, exported):
            for name, tensor, spec in named_shards(held):
                part = expected.weights[name][spec.slices(groups.topology, groups.rank)]
                assert torch.equal(tensor, part), name

    simulate(Topology(before).world_size, save)
    simulate(Topology(after).world_size, load)


def _mark(name: str) -> int:
    """A number for each name."""
    return zlib.crc32(name.encode())


@pytest.mark.slow
def test_real_processes_make_the_steps_of_one_rank() -> None:
    config = run_config(tied=True, layout=Layout(pp=2, dp=1), **INTERLEAVED)
    assert_equals_one_rank(spawn(_program, 2, config, timeout=100), one_rank(tied=True))


def _program(world: World, config: RunConfig) -> Seen:
    return train(config, world)


# What a stage holds, and what it refuses.


def test_stages_hold_the_whole_model_in_order() -> None:
    config = run_config(layout=Layout(pp=2), **INTERLEAVED)
    held = {stage: chunks_of(config, 2, stage) for stage in range(2)}
    assert [list(chunk.layers) for chunk in held[0]] == [[0], [2]]
    assert [list(chunk.layers) for chunk in held[1]] == [[1], [3, 4]]
    assert [(c.has_embedding, c.has_head) for c in (*held[0], *held[1])] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert [list(expert_layers(config.model, c)) for c in (*held[0], *held[1])] == [[0], [1], [], [2]]


def test_one_stage_holds_one_chunk_whatever_the_pipeline_says() -> None:
    config = run_config(schedule="interleaved", chunks=2, split=(1, 1, 1, 2))
    config.validate()
    (chunk,) = chunks_of(config, 1, 0)
    assert list(chunk.layers) == list(range(5))
    assert chunk.has_embedding
    assert chunk.has_head


def test_routings_are_replayed_in_the_chunk_that_they_belong_to() -> None:
    config = run_config(layout=Layout(pp=2, dp=1), **INTERLEAVED)

    def routings(world: World, overrides: list[list[Routing]] | None) -> list[list[Routing]]:
        groups = ProcessGroups(Topology(config.layout), world)
        stage = Stage.build(build_model, config, groups, CPU, torch.float64)
        kept: dict[tuple[int, int], Any] = {}

        def visit(chunk: int, micro_batch: int, output: ModelOutput) -> None:
            kept[micro_batch, chunk] = output.routings

        stage.train_on([window(0), window(1)], lambda _: None, visit, overrides)
        return [[routing for chunk in range(2) for routing in kept[m, chunk]] for m in range(2)]

    own = simulate(2, lambda world: routings(world, None))
    shifted = [
        [
            [replace(r, topk_ids=(r.topk_ids + 1 + m + n) % 4) for n, r in enumerate(rs)]
            for m, rs in enumerate(of)
        ]
        for of in own
    ]
    assert [len(of_rank[0]) for of_rank in own] == [2, 1]
    used = simulate(2, lambda world: routings(world, shifted[world.rank]))
    for wanted, found in zip(shifted, used, strict=True):
        for a, b in zip(wanted, found, strict=True):
            assert all(torch.equal(x.topk_ids, y.topk_ids) for x, y in zip(a, b, strict=True))
    with pytest.raises(ConfigError, match="2 layers"):
        simulate(2, lambda world: routings(world, [rs[:1] for rs in shifted[0]]))


def test_a_stage_with_other_chunks_than_its_pipeline_wants_is_refused() -> None:
    config = run_config()
    whole = build_model(config, single_groups(), chunks_of(config, 1, 0)[0], CPU, torch.float64)
    with pytest.raises(UsageError, match=r"2 were given, layout\.pp=1"):
        Stage([whole, whole], single_groups())

    def rank(world: World) -> None:
        Stage([whole], ProcessGroups(Topology(Layout(pp=2)), world))

    with pytest.raises(UsageError, match=r"Use Stage\.build"):
        simulate(2, rank)


def test_a_model_that_is_not_what_its_pattern_says_is_refused_in_a_pipeline() -> None:
    class Silent(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Batch, **given: Any) -> ModelOutput:
            return replace(self.model(batch, **given), stats=())

    with pytest.raises(ConfigError, match=r"model\.pattern gives it"):
        pipeline_run(run_config(layout=Layout(pp=2, dp=1)), change=lambda model, _: Silent(model))
