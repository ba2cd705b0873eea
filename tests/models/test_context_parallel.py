"""The decoder whose windows are shared by context-parallel ranks, against the same decoder on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from isozyme.core.batch import Batch, StepTotals
from isozyme.core.config import DataConfig, RunConfig
from isozyme.core.context import AttentionConfig, ContextMethod, ContextOrder
from isozyme.core.errors import ConfigError
from isozyme.core.genome.windows import totals_of
from isozyme.core.topology import Layout, Topology
from isozyme.launch.evaluate import evaluate
from isozyme.launch.step import StepResult, TrainStep, step_totals
from isozyme.models.decoder import Decoder, build_model
from isozyme.models.stage import Stage
from isozyme.models.types import Chunk
from isozyme.moe.capacity import DropPolicy
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.shard_spec import ShardSpec
from isozyme.parallel.simulated import SimulatedWorld, simulate
from tests.models.common import CPU, random_batch, tiny

WINDOWS, WINDOW = 4, 16
METHODS: tuple[ContextMethod, ...] = ("allgather", "ring", "ulysses")
ORDERS: tuple[ContextOrder, ...] = ("zigzag", "contiguous")


def config_for(
    method: ContextMethod = "allgather",
    order: ContextOrder = "zigzag",
    *,
    capacity: float | None = None,
    policy: DropPolicy = "probability",
) -> RunConfig:
    config = tiny(vocab_size=38, attention=AttentionConfig(context=method, context_order=order))
    moe = config.model.moe
    router = replace(moe.router, aux_loss=0.5, z_loss=0.1)
    moe = replace(moe, router=router, capacity_factor=capacity, drop_policy=policy)
    return replace(config, model=replace(config.model, moe=moe))


def unlike_windows() -> Batch:
    """Two documents, one whole window, padding at the end, and one that is all padding."""
    real = torch.arange(WINDOW) < torch.tensor([WINDOW, WINDOW, 11, 0])[:, None]
    documents = (~real).long()
    documents[0, 6:] = 1
    places = torch.arange(WINDOW).expand(WINDOWS, -1)
    starts = torch.zeros(WINDOWS, WINDOW, dtype=torch.long)
    starts[0, 6:] = 6
    starts[2, 11:] = 11
    generator = torch.Generator().manual_seed(5)
    known = torch.rand(WINDOWS, WINDOW, generator=generator) < 0.8
    return random_batch(
        WINDOWS,
        WINDOW,
        label_valid=real & known,
        token_valid=real,
        documents=documents,
        positions=places - starts,
        packed=True,
    )


def dealt(batch: Batch, rank: int, size: int) -> Batch:
    """The windows of one dense replica."""
    share = WINDOWS // size
    parts = {
        field.name: value[rank * share : (rank + 1) * share]
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return replace(batch, **parts)  # type: ignore[arg-type]


class Gradients:
    """An optimiser that changes nothing, so that the step leaves the reduced gradients to be read."""

    def step(self, lr: float) -> None:
        """Leave the weights as they are."""


@dataclass(frozen=True)
class Step:
    """What a training step in fp64 reports, and this rank's shard of every reduced gradient."""

    result: StepResult
    totals: StepTotals
    gradients: dict[str, Tensor]
    specs: dict[str, ShardSpec]


def one_step(config: RunConfig, groups: ProcessGroups, batch: Batch) -> Step:
    model = Stage.build(build_model, config, groups, CPU, torch.float64)
    buffer = GradientBuffer(model.parameters(), groups)
    step = TrainStep(model, buffer, Gradients(), groups)
    mine = dealt(batch, groups.coordinates["dp"], groups.topology.size("dp"))
    totals = step_totals(totals_of([mine]), groups, CPU)
    result = step([mine], totals, 0.1)
    gradients = {s.spec.name: s.parameter.main_grad.clone() for s in buffer.segments}  # type: ignore[attr-defined]
    return Step(result, totals, gradients, {s.spec.name: s.spec for s in buffer.segments})


def one_rank(config: RunConfig, batch: Batch) -> Step:
    return one_step(config, ProcessGroups(Topology(Layout()), SingleWorld()), batch)


def errors(config: RunConfig, layout: Layout, batch: Batch) -> dict[str, float]:
    """The largest relative deviation from one rank of what any rank reports."""
    alone = one_rank(config, batch)
    expected = alone.result

    def program(world: SimulatedWorld) -> dict[str, float]:
        groups = ProcessGroups(Topology(layout), world)
        step = one_step(config, groups, batch)
        found = step.result
        assert step.totals == alone.totals
        assert torch.equal(found.routed, expected.routed)
        assert torch.equal(found.dropped, expected.dropped)
        wrong = {
            name: abs(getattr(found, name) / getattr(expected, name) - 1)
            for name in ("loss", "aux_loss", "z_loss", "grad_norm")
        }
        for name, gradient in step.gradients.items():
            part = alone.gradients[name][step.specs[name].slices(groups.topology, groups.rank)]
            floor = max(float(part.norm()), 1e-6 * expected.grad_norm)
            wrong[name] = float((gradient - part).norm()) / floor
        return wrong

    by_rank = simulate(Topology(layout).world_size, program, schedule_seed=1)
    return {name: max(wrong.get(name, 0.0) for wrong in by_rank) for wrong in by_rank for name in wrong}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_train_as_one(method: ContextMethod, order: ContextOrder) -> None:
    wrong = errors(config_for(method, order), Layout(cp=2), unlike_windows())
    assert max(wrong.values()) < 1e-9, wrong


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize("layout", [Layout(cp=4), Layout(cp=2, dp=2, ep=4), Layout(cp=2, pp=2)], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_context_parallelism_goes_with_other_axes(  # each of them: tests/equivalence
    method: ContextMethod, layout: Layout
) -> None:
    wrong = errors(config_for(method), layout, unlike_windows())
    assert max(wrong.values()) < 1e-9, wrong


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(
    ("layout", "order", "policy"),
    [
        (Layout(cp=2, ep=2), "zigzag", "probability"),
        (Layout(cp=2, ep=2), "contiguous", "position"),
        (Layout(tp=2, cp=2), "contiguous", "probability"),
        (Layout(tp=2, cp=2), "zigzag", "position"),
    ],
    ids=str,
)
def test_capacity_is_that_of_the_whole_window(
    layout: Layout, order: ContextOrder, policy: DropPolicy
) -> None:
    config = config_for(order=order, capacity=0.7, policy=policy)
    assert int(one_rank(config, unlike_windows()).result.dropped.sum()) > 10
    wrong = errors(config, layout, unlike_windows())
    assert max(wrong.values()) < 1e-9, wrong


def test_windows_of_one_document_need_no_boundaries() -> None:
    batch = random_batch(WINDOWS, WINDOW)
    for method in METHODS:
        wrong = errors(config_for(method), Layout(cp=2), batch)
        assert max(wrong.values()) < 1e-9, (method, wrong)


def test_evaluation_counts_every_label_once() -> None:
    config, batch = config_for(), unlike_windows()

    def program(groups: ProcessGroups) -> tuple[float, int]:
        model = build_model(config, groups, Chunk.whole(config.model.num_layers), CPU, torch.float64)
        mine = dealt(batch, groups.coordinates["dp"], groups.topology.size("dp"))
        found = evaluate(model, [mine], groups, CPU)
        return found.bits_per_base, found.labels

    bits, labels = program(ProcessGroups(Topology(Layout()), SingleWorld()))
    assert labels == int(batch.label_valid.sum())
    for found_bits, found_labels in simulate(
        4, lambda world: program(ProcessGroups(Topology(Layout(cp=2, dp=2)), world))
    ):
        assert found_labels == labels
        assert found_bits == pytest.approx(bits, rel=1e-12)


def test_logits_are_those_of_the_ranks_own_tokens() -> None:
    config, batch = config_for("ring"), unlike_windows()
    layout = ContextLayout(window=WINDOW, size=2)

    def program(groups: ProcessGroups) -> Tensor:
        model = build_model(config, groups, Chunk.whole(config.model.num_layers), CPU, torch.float64)
        return model.logits(batch).detach()

    whole = program(ProcessGroups(Topology(Layout()), SingleWorld()))
    parts = simulate(2, lambda world: program(ProcessGroups(Topology(Layout(cp=2)), world)))
    real = batch.token_valid
    restored = layout.restore(torch.cat(parts, dim=1))
    torch.testing.assert_close(restored[real], whole[real], rtol=1e-9, atol=1e-9)


class _LocalPositions(Decoder):
    """A decoder that numbers the tokens of each rank from zero."""

    def _share(self, batch: Batch):  # type: ignore[no-untyped-def]
        own, plan = super()._share(batch)
        local = torch.arange(own.window_length).expand(own.num_windows, -1)
        return replace(own, positions=local), plan


class _LocalPlaces(Decoder):
    """A decoder that takes a rank's tokens for the beginning of the window where capacity is cut."""

    def _share(self, batch: Batch):  # type: ignore[no-untyped-def]
        own, plan = super()._share(batch)
        if plan is None:
            return own, plan
        order: ContextOrder = "contiguous" if plan.layout.order == "zigzag" else "zigzag"
        return own, replace(plan, layout=replace(plan.layout, order=order))


@pytest.mark.parametrize("fault", [_LocalPositions, _LocalPlaces])
def test_positions_of_the_rank_and_the_wrong_layout_are_caught(
    fault: type[Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, batch = config_for(), random_batch(WINDOWS, WINDOW)
    expected = one_rank(config, batch).result
    monkeypatch.setattr("isozyme.models.decoder.Decoder", fault)

    def program(world: SimulatedWorld) -> float:
        return one_step(config, ProcessGroups(Topology(Layout(cp=2)), world), batch).result.loss

    assert all(abs(loss / expected.loss - 1) > 1e-4 for loss in simulate(2, program))


def _problems(layout: Layout, window: int, **attention: object) -> Sequence[str]:
    config = tiny(attention=AttentionConfig(**attention))  # type: ignore[arg-type]
    return replace(config, layout=layout, data=DataConfig(window=window)).problems()


def test_a_run_is_refused_before_it_starts_with_the_legal_values() -> None:
    assert not _problems(Layout(cp=4), 16, context="ulysses")
    (message,) = _problems(Layout(cp=4), 20)
    assert "20 % 8 = 4. The nearest windows are 16 and 24." in message
    (message,) = _problems(Layout(cp=3), 18, context="ulysses")
    assert "Choose layout.cp from 1, 2, 4, or model.attention.context=allgather or ring." in message
    assert not _problems(Layout(cp=3), 18, context="ring")


def test_a_window_that_a_batch_brings_is_checked_as_well() -> None:
    def program(world: SimulatedWorld) -> None:
        groups = ProcessGroups(Topology(Layout(cp=2)), world)
        model = build_model(config_for(), groups, Chunk.whole(3), CPU, torch.float64)
        model(random_batch(2, 18))

    with pytest.raises(ConfigError, match="18 % 4 = 2"):
        simulate(2, program)


def test_ulysses_with_too_few_heads_is_refused_when_the_model_is_built() -> None:
    def program(world: SimulatedWorld) -> None:
        groups = ProcessGroups(Topology(Layout(cp=3)), world)
        build_model(config_for("ulysses"), groups, Chunk.whole(3), CPU, torch.float64)

    with pytest.raises(ConfigError, match="4 % 3 = 1"):
        simulate(3, program)
