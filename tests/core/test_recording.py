"""Which runs may record their step, and what the others are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isozyme.core.config import MoEConfig, OptimConfig, RunConfig, TrainConfig
from isozyme.core.topology import Layout

RECORDED = RunConfig(device="cuda", precision="bf16", train=TrainConfig(cuda_graph=True))
GATHERED = MoEConfig(dispatcher="allgather", equal_tokens=True)


def with_moe(config: RunConfig, moe: MoEConfig) -> RunConfig:
    return replace(config, model=replace(config.model, moe=moe))


@pytest.mark.parametrize(
    "config",
    [
        RECORDED,
        replace(RECORDED, layout=Layout(dp=4, tp=2)),
        with_moe(replace(RECORDED, precision="fp8_rowwise"), MoEConfig(experts="grouped_fp8")),
        replace(with_moe(RECORDED, GATHERED), layout=Layout(dp=2, ep=2)),
        replace(
            with_moe(RECORDED, MoEConfig(capacity_factor=1.0, pad_to_capacity=True)),
            layout=Layout(dp=2, ep=2),
        ),
    ],
)
def test_a_step_that_never_asks_the_host_may_be_recorded(config: RunConfig) -> None:
    assert [each for each in config.problems() if "cuda_graph" in each or "host" in each] == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(RECORDED, device="cpu"), "CUDA graphs need CUDA"),
        (replace(RECORDED, layout=Layout(pp=2)), "layout.pp=2"),
        (replace(RECORDED, optim=OptimConfig(sharded=True, overlap_gather=True)), "overlap_gather=true"),
        (replace(RECORDED, layout=Layout(dp=2, ep=2)), "model.moe.dispatcher=allgather and"),
        (replace(RECORDED, precision="fp8_current"), "precision=fp8_current"),
        (with_moe(RECORDED, MoEConfig(experts="te")), "model.moe.experts=te"),
    ],
)
def test_one_that_does_is_refused_with_what_to_set(config: RunConfig, words: str) -> None:
    (found,) = [each for each in config.problems() if words in each]
    assert "train.cuda_graph=true" in found, "who reads it must see which setting asks for it"
    assert not [each for each in replace(config, train=TrainConfig()).problems() if words in each]
