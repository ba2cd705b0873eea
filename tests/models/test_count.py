"""Counted parameters and operations against built models, torch's own counter and published numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from isozyme.core.config import ModelConfig
from isozyme.models.count import count_parameters, training_flops_per_token
from isozyme.models.presets import preset
from tests.models.common import random_batch, tiny, whole


def test_mixtral_has_the_published_number_of_parameters() -> None:
    count = count_parameters(preset("mixtral_8x7b").model)
    assert count.total == 46_702_792_704
    assert count.active == 12_879_925_248


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True},
        {"pattern": "D"},
        {"pattern": "M", "head_dim": 6},
        {"num_kv_heads": 4, "num_layers": 1},
        {"moe": dataclasses.replace(tiny().model.moe, shared_ffn=8)},
    ],
)
def test_the_count_equals_the_parameters_of_a_built_model(changes: dict[str, object]) -> None:
    config = tiny(**changes)
    built = sum(parameter.numel() for parameter in whole(config).parameters())
    assert count_parameters(config.model).total == built


def test_active_parameters_are_those_of_a_model_with_topk_experts() -> None:
    model = tiny().model
    fewer = dataclasses.replace(
        model, moe=dataclasses.replace(model.moe, router=dataclasses.replace(model.moe.router, num_experts=2))
    )
    unused_router_rows = 2 * 2 * model.hidden
    assert count_parameters(model).active == count_parameters(fewer).total + unused_router_rows


def test_flops_equal_those_that_torch_counts_in_a_dense_model() -> None:
    """torch counts all S keys of a query, not the causal half, and knows no products that add in place."""
    config, windows, length = tiny(pattern="D", num_kv_heads=4), 2, 16
    model, batch = whole(config, torch.float32), random_batch(windows, length)

    def added(_total: list[int], left: list[int], right: list[int], **_: Any) -> int:
        return 2 * left[0] * left[1] * right[1]

    in_place = {torch.ops.aten.addmm_: added}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, sdpa_kernel(SDPBackend.MATH):
        model(batch).loss_sum.backward()
    sizes = config.model
    attention = 6 * sizes.num_layers * sizes.num_heads * sizes.head_width
    not_causal = attention * (2 * length - (length + 1))
    expected = training_flops_per_token(sizes, length) + not_causal
    assert counter.get_total_flops() == windows * length * expected


def test_flops_of_experts_follow_topk_and_not_their_number() -> None:
    def flops(**changes: int) -> int:
        model = ModelConfig()
        router = dataclasses.replace(model.moe.router, **changes)
        return training_flops_per_token(
            dataclasses.replace(model, moe=dataclasses.replace(model.moe, router=router)), 256
        )

    model = ModelConfig()
    per_expert = 18 * model.hidden * model.moe.ffn * model.num_layers
    assert flops(topk=3) - flops(topk=2) == per_expert
    assert flops(num_experts=9) - flops(num_experts=8) == 6 * model.hidden * model.num_layers
