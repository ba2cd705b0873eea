"""Configurations that break a rule are refused in words, with the arithmetic, before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isozyme.core.config import (
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    RunConfig,
    TrainConfig,
)
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout

EIGHT = RouterConfig(num_experts=8, topk=2)


def with_router(router: RouterConfig, layout: Layout | None = None) -> RunConfig:
    model = ModelConfig(moe=MoEConfig(router=router))
    return RunConfig(model=model, layout=Layout() if layout is None else layout)


def test_the_defaults_break_no_rule() -> None:
    assert RunConfig().problems() == []
    assert with_router(EIGHT, Layout(dp=2, ep=2)).problems(world_size=2) == []


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (replace(EIGHT, topk=9), r"topk=9, .*num_experts=8\. Choose topk from 1 to 8"),
        (replace(EIGHT, topk=0), r"topk=0, .*Choose topk from 1 to 8"),
        (replace(EIGHT, topk=-1), r"topk=-1"),
        (replace(EIGHT, num_experts=0), r"num_experts must be at least 1"),
        (replace(EIGHT, aux_loss=-0.1), r"aux_loss must not be negative: .*=-0\.1\. Use 0 for off"),
        (replace(EIGHT, z_loss=-0.1), r"z_loss must not be negative"),
        (replace(EIGHT, expert_bias_rate=-0.1), r"expert_bias_rate must not be negative"),
        (replace(EIGHT, scaling_factor=0.0), r"scaling_factor must be positive"),
        (replace(EIGHT, num_groups=3), r"num_groups=3, .*num_experts=8\. Choose from 1, 2, 4, 8"),
        (replace(EIGHT, num_groups=4, topk_groups=5), r"topk_groups=5, .*num_groups=4"),
        (replace(EIGHT, num_groups=4, topk_groups=1, topk=3), r"topk=3; 1 groups x 2 experts = 2"),
    ],
)
def test_routers_that_cannot_choose_are_refused(router: RouterConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_router(router).validate()


def test_one_mistake_is_reported_once() -> None:
    assert len(with_router(replace(EIGHT, topk=9)).problems()) == 1


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_capacity_factor_of_zero_or_less_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="capacity_factor must be positive, or null for dropless"):
        RunConfig(model=ModelConfig(moe=MoEConfig(capacity_factor=factor))).validate()


def test_experts_that_do_not_divide_over_ep_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        ConfigError, match=r"num_experts=8, layout\.ep=3; 8 % 3 = 2\. Choose ep from 1, 2, 4, 8"
    ):
        with_router(EIGHT, Layout(dp=3, ep=3)).validate()
    with pytest.raises(ConfigError, match=r"layout\.ep=16; 8 % 16 = 8"):
        with_router(EIGHT, Layout(dp=16, ep=16)).validate()


@pytest.mark.parametrize(
    "order", ["tp-tp-cp-ep-dp-pp", "tp-cp-ep-pp", "tp-cp-ep-dp-xx", "", "tp-cp-ep-dp-pp-pp"]
)
def test_an_order_with_a_missing_repeated_or_unknown_axis_is_refused(order: str) -> None:
    with pytest.raises(ConfigError, match=r"layout\.order must name each of tp, cp, ep, dp, pp once"):
        RunConfig(layout=Layout(order=order)).validate()


def test_pp_must_be_outermost() -> None:
    with pytest.raises(ConfigError, match="pp must be outermost"):
        RunConfig(layout=Layout(order="tp-pp-cp-ep-dp")).validate()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RunConfig(seed=2**63), "seed must be a number of 64 bits"),
        (RunConfig(optim=OptimConfig(lr=0.0)), "optim.lr must be positive"),
        (RunConfig(optim=OptimConfig(clip=-1.0)), "optim.clip must not be negative"),
        (RunConfig(data=DataConfig(window=1)), "data.window must be at least 2"),
        (RunConfig(data=DataConfig(held_out=1.0)), "data.held_out is a share between 0 and 1"),
        (RunConfig(train=TrainConfig(steps=0)), "train.steps must be at least 1"),
        (RunConfig(train=TrainConfig(global_batch=5, micro_batch=4)), "5 % 4 = 1"),
        (RunConfig(model=ModelConfig(pattern="MX")), "pattern holds the letters M"),
        (RunConfig(model=ModelConfig(num_heads=5)), "num_heads must divide hidden"),
    ],
)
def test_other_values_that_cannot_be_meant_are_refused(config: RunConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config.validate()


def test_a_tied_embedding_starts_as_small_as_a_head_unless_told() -> None:
    assert ModelConfig(tied=True, init_std=0.03).embedding_scale == 0.03
    assert ModelConfig(tied=False).embedding_scale == 1.0
    assert ModelConfig(tied=True, embedding_std=0.5).embedding_scale == 0.5
    assert ModelConfig(embedding_std=-1.0).problems() == [
        "model.embedding_std must be positive: model.embedding_std=-1.0."
    ]
