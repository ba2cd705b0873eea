"""Any layout does what one rank does: losses, every gradient, the norm, weights after three steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from isozyme.core.config import ModelConfig, MoEConfig, OptimConfig, RouterConfig, RunConfig
from isozyme.core.topology import Layout
from isozyme.launch.verify_judge import Reference, judge
from isozyme.launch.verify_plan import prepare, settings
from isozyme.launch.verify_run import Experiment, Setting

LAYOUTS = (
    Layout(dp=1),
    Layout(dp=2, ep=1),
    Layout(dp=2, ep=2),
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4),
)
SPREAD = (Layout(dp=2, ep=2), Layout(dp=4, ep=2))


def _run(router: dict[str, Any] | None = None, moe: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    config = ModelConfig(
        num_heads=4,
        num_kv_heads=2,
        pattern="DM",
        moe=MoEConfig(
            router=RouterConfig(num_experts=4, topk=2, z_loss=1e-3, **(router or {})), **(moe or {})
        ),
    )
    return RunConfig(seed=5, model=replace(config, **model), optim=OptimConfig(lr=1e-3))


VARIANTS = {
    "plain": _run(),
    "tied": _run(tied=True, pattern="M"),
    "shared expert": _run(moe={"shared_ffn": 8}),
    "sigmoid and bias": _run(
        {"score": "sigmoid", "expert_bias_rate": 1e-3, "scaling_factor": 2.5}, pattern="M"
    ),
    "groups": _run({"num_groups": 2, "topk_groups": 1, "renormalize": False}),
    "capacity": _run(moe={"capacity_factor": 1.0}),
    "capacity by position": _run(moe={"capacity_factor": 0.75, "drop_policy": "position"}),
    "padded capacity": _run(moe={"capacity_factor": 1.25, "pad_to_capacity": True}),
}


@cache
def _experiment(variant: str) -> Experiment:
    return prepare(VARIANTS[variant], LAYOUTS)


@cache
def _reference(variant: str, dtype: torch.dtype) -> Reference:
    return Reference.of(_experiment(variant), dtype)


def _settings(variant: str, layouts: tuple[Layout, ...], dtype: torch.dtype, *names: str) -> list[Setting]:
    return settings(_experiment(variant).config, layouts, dtypes=[dtype], dispatchers=names)


def _hold(variant: str, setting: Setting) -> None:
    outcome = judge(_experiment(variant), setting, _reference(variant, setting.dtype))
    assert outcome.passed, outcome.explain()


def _name(setting: Setting) -> str:
    return f"{setting.layout} {setting.dispatcher} {setting.experts}"


@pytest.mark.parametrize("setting", _settings("plain", LAYOUTS, torch.float64), ids=_name)
def test_every_layout_and_dispatcher_equals_one_rank_in_fp64(setting: Setting) -> None:
    _hold("plain", setting)


@pytest.mark.parametrize("setting", _settings("plain", LAYOUTS, torch.float32, "alltoall"), ids=_name)
def test_every_layout_and_backend_equals_one_rank_in_fp32(setting: Setting) -> None:
    _hold("plain", setting)


@pytest.mark.parametrize(
    ("variant", "setting"),
    [
        pytest.param(variant, setting, id=f"{variant} {_name(setting)}")
        for variant in VARIANTS
        if variant != "plain"
        for setting in _settings(variant, SPREAD, torch.float64, "alltoall")
    ],
)
def test_every_kind_of_model_equals_one_rank_in_fp64(variant: str, setting: Setting) -> None:
    _hold(variant, setting)


@pytest.mark.parametrize("variant", ["capacity", "capacity by position", "padded capacity"])
def test_capacity_drops_slots_in_the_runs_that_are_compared(variant: str) -> None:
    routings = _reference(variant, torch.float64).routings
    experiment = _experiment(variant)
    dropped = [
        int((~routing.kept[: experiment.windows.num_real(window)]).sum())
        for (window, _), routing in routings.items()
    ]
    assert sum(dropped) > 0
