"""The reduced model keeps what matters, and its data are as awkward as promised."""

from __future__ import annotations

import pytest
import torch

from isozyme.core.config import ModelConfig, MoEConfig, RouterConfig, RunConfig
from isozyme.core.genome.windows import totals_of
from isozyme.core.topology import Layout
from isozyme.launch.compose import compose
from isozyme.launch.verify_judge import Reference
from isozyme.launch.verify_plan import prepare
from isozyme.launch.verify_reduced import MICRO_BATCH, PADDED_STEP, Windows, reduced, starved_expert
from isozyme.launch.verify_routing import load_by_layer
from isozyme.launch.verify_run import Setting

LAYOUTS = (Layout(dp=1), Layout(dp=4, ep=2), Layout(dp=3))


def _recipe(**model: object) -> RunConfig:
    return RunConfig(seed=1, model=ModelConfig(**model))  # type: ignore[arg-type]


def test_reduction_keeps_experts_head_ratio_tying_and_losses() -> None:
    big = compose("L1_8x7B_ep", ["model.tied=true", "model.moe.capacity_factor=1.5"])
    small = reduced(big, LAYOUTS)
    assert small.model.moe.router == big.model.moe.router
    assert small.model.num_heads // small.model.num_kv_heads == big.model.num_heads // big.model.num_kv_heads
    assert small.model.tied
    assert small.model.moe.capacity_factor == 1.5
    assert small.problems() == []


def test_a_run_whose_steps_are_recorded_is_verified_eagerly_with_equal_tokens_where_they_can_be() -> None:
    fast = [
        "device=cuda",
        "layout.dp=2",
        "layout.ep=2",
        "train.cuda_graph=true",
        "model.moe.equal_tokens=true",
    ]
    config = compose("L0_sanity", [*fast, "model.moe.dispatcher=allgather", "optim.main_grad=as_computed"])
    small = prepare(config, [Layout(dp=2, ep=2)]).config
    for dispatcher in ("allgather", "alltoall"):
        setting = Setting(layout=Layout(dp=2), dtype=torch.float64, dispatcher=dispatcher, experts="loop")
        run = setting.of(small)
        assert run.problems() == []
        assert not run.train.cuda_graph
        assert not run.model.moe.cache_quantized_weights
        assert run.model.moe.equal_tokens == (dispatcher == "allgather")


@pytest.mark.parametrize(
    ("pattern", "layers", "expected"),
    [("DM", 32, "DM"), ("M", 8, "MM"), ("DDDMMMMMM", 9, "DM"), ("D", 1, "DD")],
)
def test_reduction_keeps_the_kinds_of_layers(pattern: str, layers: int, expected: str) -> None:
    small = reduced(_recipe(pattern=pattern, num_layers=layers), LAYOUTS)
    assert small.model.layer_kinds() == expected


def test_every_layout_divides_the_global_batch_and_accumulates() -> None:
    small = reduced(_recipe(), LAYOUTS)
    windows = Windows(small, LAYOUTS)
    for dp in (1, 3, 4):
        dealt = [windows.of_rank(0, rank, dp) for rank in range(dp)]
        assert all(len(batches) >= 2 and all(len(b) == MICRO_BATCH for b in batches) for batches in dealt)
        flat = sorted(index for batches in dealt for batch in batches for index in batch)
        assert flat == list(range(small.train.global_batch))


def test_pipeline_stages_divide_the_layers() -> None:
    small = reduced(_recipe(), [Layout(pp=3), Layout(pp=2)])
    assert small.model.num_layers % 6 == 0


def test_windows_differ_and_hold_padding_unknown_bases_and_one_without_labels() -> None:
    small = reduced(_recipe(), LAYOUTS)
    windows = Windows(small, LAYOUTS)
    batch = windows.batch(range(small.train.global_batch))
    assert len({tuple(row) for row in batch.tokens.tolist()}) == batch.num_windows
    real = batch.token_valid.any(dim=1)
    labelled = batch.label_valid.any(dim=1)
    assert (~real).any()
    assert (real & ~labelled).any()
    assert (batch.token_valid & ~batch.label_valid).any()
    assert not (batch.label_valid & ~batch.token_valid).any()
    assert batch.documents.max() > 0
    assert torch.equal(batch.tokens, windows.batch(range(small.train.global_batch)).tokens)


def test_one_rank_of_the_widest_layout_reads_padding_alone_once() -> None:
    small = reduced(_recipe(), LAYOUTS)
    windows = Windows(small, LAYOUTS)
    last, other = (
        totals_of(windows.batch(b) for b in windows.of_rank(PADDED_STEP, rank, 4)) for rank in (3, 0)
    )
    assert last.real_tokens == 0
    assert other.valid_labels > 0


def test_the_routing_that_is_compared_is_skewed_and_leaves_an_expert_empty() -> None:
    experiment = prepare(_recipe(moe=MoEConfig(router=RouterConfig(num_experts=8, topk=2))), [Layout(dp=2)])
    loads = load_by_layer(Reference.of(experiment, torch.float64).routings)
    starved = starved_expert(experiment.config.model)
    assert starved is not None
    assert loads[0][starved] == 0
    for counts in loads.values():
        assert max(counts) > 2 * sum(counts) / len(counts)


def test_no_expert_is_starved_where_a_token_takes_them_all() -> None:
    assert starved_expert(ModelConfig(moe=MoEConfig(router=RouterConfig(num_experts=2, topk=2)))) is None
