"""Layouts with tensor parallelism do what one rank does, wherever experts are; faults of it are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from isozyme.core.config import ModelConfig, MoEConfig, OptimConfig, RouterConfig, RunConfig
from isozyme.core.topology import Layout
from isozyme.launch.verify_faults import Fault, TamperedWorld
from isozyme.launch.verify_judge import Reference, judge
from isozyme.launch.verify_plan import prepare
from isozyme.launch.verify_run import Experiment, Setting
from isozyme.moe.router import Router
from isozyme.parallel.communicator import Call, Communicator, Finished, Pending
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import Replica, attach, spec_of

LAYOUTS = (
    Layout(tp=2, dp=1),
    Layout(tp=4, dp=1),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=1, ep=2),
    Layout(tp=2, dp=2, ep=4),
    Layout(tp=2, dp=1, etp=2),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(tp=4, dp=2, ep=8),
    Layout(tp=2, dp=2, etp=4),
    Layout(tp=1, dp=2, etp=2),
    Layout(tp=2, dp=2, ep=2, order="dp-ep-tp-cp-pp"),
)
SPREAD = (Layout(tp=4, dp=1, ep=2, etp=2), Layout(tp=2, dp=2, ep=4))


def _model(**changes: object) -> RunConfig:
    """4 query heads and 2 K/V heads, so that tp=4 replicates the latter; dense and expert layers."""
    router = RouterConfig(num_experts=8, topk=2, z_loss=1e-3, aux_loss=0.05)
    moe = MoEConfig(router=router, shared_ffn=16)
    sizes = ModelConfig(num_heads=4, num_kv_heads=2, pattern="DM", moe=moe)
    return RunConfig(seed=6, model=replace(sizes, **changes), optim=OptimConfig(lr=1e-3))  # type: ignore[arg-type]


_MOE = _model().model.moe
VARIANTS = {
    "plain": _model(),
    "tied": _model(tied=True),
    "one K/V head": _model(num_kv_heads=1, pattern="M"),
    "many K/V heads": _model(num_heads=8, num_kv_heads=8),
    "capacity": _model(moe=replace(_MOE, capacity_factor=1.0)),
    "capacity by position": _model(moe=replace(_MOE, capacity_factor=0.75, drop_policy="position")),
    "padded capacity": _model(moe=replace(_MOE, capacity_factor=1.25, pad_to_capacity=True)),
    "sigmoid and bias": _model(
        moe=replace(
            _MOE, router=replace(_MOE.router, score="sigmoid", expert_bias_rate=1e-3, scaling_factor=2.5)
        )
    ),
}


@cache
def _experiment(variant: str) -> Experiment:
    return prepare(VARIANTS[variant], (*LAYOUTS, *SPREAD))


@cache
def _reference(variant: str, dtype: torch.dtype = torch.float64) -> Reference:
    return Reference.of(_experiment(variant), dtype)


def _setting(layout: Layout, dispatcher: str = "alltoall", dtype: torch.dtype = torch.float64) -> Setting:
    return Setting(layout=layout, dtype=dtype, dispatcher=dispatcher, experts="loop")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_losses_gradients_norms_and_weights_equal_those_of_one_rank_in_fp64(layout: Layout) -> None:
    outcome = judge(_experiment("plain"), _setting(layout), _reference("plain"))
    assert outcome.passed, outcome.explain()


@pytest.mark.parametrize("layout", SPREAD, ids=str)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
def test_every_kind_of_model_equals_one_rank_in_fp64(variant: str, layout: Layout) -> None:
    outcome = judge(_experiment(variant), _setting(layout), _reference(variant))
    assert outcome.passed, outcome.explain()


@pytest.mark.parametrize("layout", SPREAD, ids=str)
def test_gathering_tokens_from_all_expert_ranks_does_the_same(layout: Layout) -> None:
    outcome = judge(_experiment("plain"), _setting(layout, "allgather"), _reference("plain"))
    assert outcome.passed, outcome.explain()


@pytest.mark.parametrize("layout", SPREAD, ids=str)
def test_gradients_equal_those_of_one_rank_in_fp32_with_its_routing(layout: Layout) -> None:
    setting = _setting(layout, dtype=torch.float32)
    outcome = judge(_experiment("plain"), setting, _reference("plain", torch.float32))
    assert outcome.passed, outcome.explain()


def test_capacity_drops_slots_in_the_runs_that_are_compared() -> None:
    for variant in ("capacity", "capacity by position", "padded capacity"):
        num_real = _experiment(variant).windows.num_real
        routings = _reference(variant).routings
        assert any(not routing.kept[: num_real(window)].all() for (window, _), routing in routings.items()), (
            variant
        )


def _not_summed(
    axis: str, chosen: Callable[[nn.Module], bool]
) -> Callable[[nn.Module, ProcessGroups], nn.Module]:
    """The parameters of some modules are taken for complete along an axis where they are parts."""

    def change(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
        for module in model.modules():
            for parameter in module.parameters(recurse=False) if chosen(module) else ():
                spec = spec_of(parameter)
                assert axis in spec.replicas
                replicas: dict[str, Replica] = {**spec.replicas, axis: "identical"}
                attach(parameter, replace(spec, replicas=replicas))
        return model

    return change


def _experts_summed_over_dp(model: nn.Module, _groups: ProcessGroups) -> nn.Module:
    for parameter in model.parameters():
        spec = spec_of(parameter)
        if spec.grid == "expert":
            attach(parameter, replace(spec, grid="dense", split=(), replicas={"dp": "partial"}))
    return model


def _slice_in_backward(inner: Communicator, call: Call) -> Pending | None:
    """Where a backward should add all ranks' gradients, each rank takes its slice of its own."""
    if call.kind != "reduce_scatter" or torch._C._current_graph_task_id() == -1:
        return None
    assert call.input is not None
    assert call.output is not None
    assert call.input_sizes is not None
    call.output.copy_(call.input.split(list(call.input_sizes))[inner.rank])
    return Finished(call.output)


def _no_sum_in_forward(inner: Communicator, call: Call) -> Pending | None:
    """The statistics of the cross-entropy stay those of each rank's own part of the vocabulary."""
    floating = call.input is not None and call.input.is_floating_point()
    return Finished(call.output) if call.kind == "all_reduce" and floating else None


FAULTS = [
    (
        Fault(
            name="router not summed over TP",
            says="each TP rank keeps the router's gradient of its own tokens",
            model=_not_summed("tp", lambda module: isinstance(module, Router)),
        ),
        Layout(tp=2, dp=2, ep=2),
    ),
    (
        Fault(
            name="norms not summed over TP",
            says="each TP rank keeps the norms' gradient of its own tokens",
            model=_not_summed("tp", lambda module: type(module).__name__ == "RMSNorm"),
        ),
        Layout(tp=2, dp=1, ep=2),
    ),
    (
        Fault(
            name="replicated K/V heads not summed",
            says="ranks that hold the same K/V head keep the gradient of their own query heads",
            model=_not_summed("tp%2", lambda m: getattr(m, "weight", None) is not None and _is_kv(m)),
        ),
        Layout(tp=4, dp=1),
    ),
    (
        Fault(
            name="all-gather whose backward slices",
            says="the gradient of gathered tokens is cut instead of added",
            world=lambda world: TamperedWorld(world, ["tp"], _slice_in_backward),
        ),
        Layout(tp=2, dp=1),
    ),
    (
        Fault(
            name="experts summed over the dense group",
            says="expert gradients are summed over DP, whose ranks hold different experts",
            model=_experts_summed_over_dp,
        ),
        Layout(tp=2, dp=2, ep=4),
    ),
    (
        Fault(
            name="experts not summed over TP",
            says="expert gradients are summed over DP alone, though TP ranks hold the same experts",
            model=_experts_summed_over_dp,
        ),
        Layout(tp=2, dp=2),
    ),
    (
        Fault(
            name="vocabulary not summed",
            says="each rank normalises over its own part of the vocabulary",
            world=lambda world: TamperedWorld(world, ["tp"], _no_sum_in_forward),
        ),
        Layout(tp=2, dp=1),
    ),
]


def _is_kv(module: nn.Module) -> bool:
    weight = module.weight
    return hasattr(weight, "shard_spec") and spec_of(weight).name.endswith(("attention.k.weight", "v.weight"))


@pytest.mark.parametrize(("fault", "layout"), FAULTS, ids=[fault.name for fault, _ in FAULTS])
def test_a_fault_of_tensor_parallelism_is_found(fault: Fault, layout: Layout) -> None:
    outcome = judge(_experiment("plain"), _setting(layout), _reference("plain"), fault=fault)
    assert not outcome.passed, fault.says
    if outcome.error is not None:  # the gradient buffer compares the names of what is summed together
        assert "their parameters differ" in outcome.error
    else:
        assert outcome.comparison is not None
        assert outcome.comparison.beyond(outcome.tolerance)
