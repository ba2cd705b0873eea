"""Sharding and overlap, as a run asks for them, change neither losses nor gradients nor weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from isozyme.core.config import OptimConfig
from isozyme.core.errors import ConfigError, UsageError
from isozyme.core.genome.windows import totals_of
from isozyme.core.topology import Layout, Topology
from isozyme.launch.step import TrainStep, step_totals
from isozyme.launch.training_state import gradient_choice, training_state
from isozyme.models.decoder import build_model
from isozyme.models.stage import Stage
from isozyme.parallel.optimizer import Optimizer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.sharded_optimizer import ShardedOptimizer
from isozyme.parallel.simulated import simulate
from tests.models.common import random_batch
from tests.models.pipeline_case import CPU, Seen, run_config, train, window

# Whole training steps; annotations are checked where the parts are tested.
pytestmark = pytest.mark.usefixtures("unchecked_annotations")


def seen(layout: Layout, *, tied: bool, optim: dict[str, bool], **pipeline) -> list[Seen]:
    config = run_config(tied=tied, layout=layout, **pipeline)
    config = replace(config, optim=replace(config.optim, **optim))
    return simulate(Topology(layout).world_size, lambda world: train(config, world))


@cache
def plain(layout: Layout, tied: bool, *pipeline: tuple[str, Any]) -> list[Seen]:
    """Neither sharded nor overlapped."""
    return seen(layout, tied=tied, optim={}, **dict(pipeline))


def assert_close(found: list[Seen], want: list[Seen], tolerance: float) -> None:
    for one, other in zip(found, want, strict=True):
        for name, weight in other.weights.items():
            torch.testing.assert_close(one.weights[name], weight, rtol=tolerance, atol=tolerance)
        for step, gradients in enumerate(other.gradients):
            for name, gradient in gradients.items():
                torch.testing.assert_close(
                    one.gradients[step][name], gradient, rtol=tolerance, atol=tolerance
                )
        for result, expected in zip(one.results, other.results, strict=True):
            assert result.loss == pytest.approx(expected.loss, rel=tolerance, abs=0)
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=max(tolerance, 1e-13), abs=0)


INTERLEAVED = {"chunks": 2, "schedule": "interleaved"}
LAYOUTS = [
    (Layout(dp=1), {}, True),
    (Layout(dp=4, ep=2), {}, False),
    (Layout(tp=2, dp=2, ep=4), {}, True),
    pytest.param(Layout(dp=2, pp=2, ep=2), INTERLEAVED, False, marks=pytest.mark.slow),
    (Layout(dp=2, pp=2, ep=2), INTERLEAVED, True),  # two stages share the weight
]


@pytest.mark.parametrize(("layout", "pipeline", "tied"), LAYOUTS)
def test_overlap_changes_no_bit_and_sharding_only_the_rounding_of_the_norm(layout, pipeline, tied):
    want = plain(layout, tied, *pipeline.items())
    overlapped = seen(layout, tied=tied, optim={"overlap_reduce": True}, **pipeline)
    assert_close(overlapped, want, 0.0)
    sharded = seen(layout, tied=tied, optim={"sharded": True}, **pipeline)
    assert_close(sharded, want, 1e-12)
    everything = {"sharded": True, "overlap_reduce": True, "overlap_gather": True}
    assert_close(seen(layout, tied=tied, optim=everything, **pipeline), sharded, 0.0)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_delayed_weight_gradients_change_no_bit_and_are_there_before_their_reduction(recompute):
    layout = Layout(dp=4, ep=2)
    config = run_config(tied=False, layout=layout)
    moe = replace(config.model.moe, delay_wgrad=True)
    config = replace(
        config,
        model=replace(config.model, moe=moe, recompute=recompute),
        optim=replace(config.optim, overlap_reduce=True),
    )
    delayed = simulate(4, lambda world: train(config, world))
    assert_close(delayed, plain(layout, False), 0.0)


def bf16_steps(layout: Layout, **optim: Any) -> list[dict[str, torch.Tensor]]:
    """What each rank holds after two steps of one micro-batch in bf16: weights, state, norms, losses."""
    config = run_config(layout=layout)
    settings = OptimConfig(lr=1e-2, clip=0.1, implementation="torch", **optim)

    def program(world) -> dict[str, torch.Tensor]:
        groups = ProcessGroups(Topology(layout), world)
        stage = Stage.build(build_model, config, groups, CPU, torch.bfloat16)
        buffer, optimizer = training_state(stage, groups, settings)
        step = TrainStep(stage, buffer, optimizer, groups, clip=settings.clip)
        numbers = []
        for number in range(2):
            batches = [random_batch(2, seed=10 * number + groups.coordinates["dp"])]
            result = step(batches, step_totals(totals_of(batches), groups, CPU), settings.lr)
            assert result.clip < 0.9
            numbers += [result.loss, result.grad_norm, result.clip]
        found = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
        found |= {name: tensor.clone() for name, tensor, _ in optimizer.state()}
        found["numbers"] = torch.tensor(numbers, dtype=torch.float64)
        kinds = {s.spec.name: s.parameter.main_grad.dtype for s in buffer.segments}  # type: ignore[attr-defined]
        narrow = {name for name, dtype in kinds.items() if dtype == torch.bfloat16}
        alone = {name for name in kinds if layout.dp == 1 or (".experts." in name and layout.ep == layout.dp)}
        assert narrow == (alone if settings.main_grad == "as_computed" else set())
        return found

    return simulate(Topology(layout).world_size, program)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("layout", [Layout(dp=1), Layout(dp=2, ep=2), Layout(dp=2)])
def test_gradients_kept_as_computed_change_no_bit(layout, sharded):
    found, want = (bf16_steps(layout, main_grad=kind, sharded=sharded) for kind in ("as_computed", "fp32"))
    for one, other in zip(found, want, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
        assert all(tensor.dtype == other[name].dtype for name, tensor in one.items())


def test_gradients_kept_as_computed_need_one_micro_batch_a_step():
    config = replace(run_config(), optim=OptimConfig(main_grad="as_computed"))
    (problem,) = config.problems()
    assert problem.endswith(
        "gradients of several micro-batches are added up in fp32: optim.main_grad=as_computed, micro-batches "
        "a step=8. Set optim.main_grad=fp32, or train.micro_batch 8 times as large."
    )
    assert not replace(config, train=replace(config.train, micro_batch=8)).problems()
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    stage = Stage.build(build_model, config, groups, CPU, torch.bfloat16)
    buffer, optimizer = training_state(stage, groups, config.optim)
    count = f"{sum(parameter.numel() for parameter in stage.parameters()):,}"
    assert gradient_choice(buffer, config.optim)["gradients"].startswith(f"as computed: {count} of {count} ")
    batches = [window(index) for index in range(2)]
    with pytest.raises(UsageError, match=r"never added up: expect\(2\), and .*dense.* bfloat16"):
        TrainStep(stage, buffer, optimizer, groups)(batches, totals_of(batches), 0.1)


def test_the_settings_decide_which_optimiser_and_which_buffer():
    config = run_config()
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    stage = Stage.build(build_model, config, groups, CPU, torch.float64)
    buffer, optimizer = training_state(stage, groups, OptimConfig())
    assert type(optimizer) is Optimizer
    assert {bucket.unit for bucket in buffer.buckets} == {None}
    buffer.close()
    buffer, optimizer = training_state(stage, groups, OptimConfig(sharded=True))
    assert type(optimizer) is ShardedOptimizer
    # Five layers, what follows them, and the rest.
    assert {bucket.unit for bucket in buffer.buckets} == {0, 1, 2, 3, 4, 5, None}
    rest = [s.spec.name for bucket in buffer.buckets if bucket.unit is None for s in bucket.segments]
    assert rest == ["embedding.weight"]


def test_all_layers_are_under_way_when_the_last_backward_ends():
    config = run_config()
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    stage = Stage.build(build_model, config, groups, CPU, torch.float64)
    buffer, optimizer = training_state(stage, groups, OptimConfig(overlap_reduce=True))
    batches = [window(index) for index in range(3)]
    totals = step_totals(totals_of(batches), groups, CPU)
    TrainStep(stage, buffer, optimizer, groups).accumulate(batches, totals)
    waiting = buffer.buckets[len(buffer._pending) :]
    assert [segment.spec.name for bucket in waiting for segment in bucket.segments] == ["embedding.weight"]


def test_a_tied_head_waits_for_the_embedding():
    config = run_config(tied=True)
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    stage = Stage.build(build_model, config, groups, CPU, torch.float64)
    buffer, _ = training_state(stage, groups, OptimConfig(overlap_reduce=True))
    unit = {segment.spec.name: bucket.unit for bucket in buffer.buckets for segment in bucket.segments}
    assert (unit["final_norm.weight"], unit["embedding.weight"]) == (0, None)


def test_overlap_refuses_a_model_that_does_not_say_what_its_layers_are():
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    with pytest.raises(ConfigError, match=r"overlap_reduce=true, and Sequential has no backward_units"):
        training_state(nn.Sequential(), groups, OptimConfig(overlap_reduce=True))
    with pytest.raises(ConfigError, match=r"overlap_gather=true, and Sequential has no backward_units"):
        training_state(nn.Sequential(), groups, OptimConfig(sharded=True, overlap_gather=True))
    training_state(nn.Sequential(), groups, OptimConfig(sharded=True))


def test_gathers_ahead_without_a_sharded_optimiser_are_refused_with_the_way_out():
    config = OptimConfig(overlap_gather=True)
    (problem,) = config.problems()
    assert "optim.overlap_gather=true, optim.sharded=false. Set optim.sharded=true" in problem
    assert not OptimConfig(overlap_gather=True, sharded=True).problems()
    groups = ProcessGroups(Topology(Layout()), SingleWorld())
    stage = Stage.build(build_model, run_config(), groups, CPU, torch.float64)
    with pytest.raises(ConfigError, match="only a sharded optimiser"):
        training_state(stage, groups, config)
