"""Each unmet condition of the fused MXFP8 kernel is named, alone and together with others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from isozyme.moe.experts.fused_mlp_conditions import (
    FusedMLPFacts,
    fused_mlp_facts,
    fused_mlp_problems,
    version_tuple,
)

BLACKWELL = FusedMLPFacts(
    te_reason=None,
    has_class=True,
    capability=(10, 0),
    switch_set=True,
    frontend="1.32.0",
    cutlass_dsl="4.8.0",
    precision="mxfp8",
    hybrid_format=False,
    hidden=4096,
    ffn=14336,
    deterministic=False,
)


def test_a_blackwell_machine_with_everything_meets_all_conditions() -> None:
    assert fused_mlp_problems(BLACKWELL) == []
    assert (
        fused_mlp_problems(replace(BLACKWELL, capability=(10, 3), frontend="1.23.0", cutlass_dsl="4.5")) == []
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"te_reason": "transformer_engine is not installed"}, "not installed"),
        ({"has_class": False}, "GroupedMLP_CuTeGEMMGLU"),
        ({"capability": None}, "no CUDA device"),
        ({"capability": (9, 0)}, "this GPU has 9.0"),
        ({"capability": (12, 0)}, "this GPU has 12.0"),
        ({"switch_set": False}, "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1"),
        ({"frontend": None}, "nvidia-cudnn-frontend is not installed"),
        ({"frontend": "1.22.1"}, "1.23 or later"),
        ({"cutlass_dsl": None}, "nvidia-cutlass-dsl is not installed"),
        ({"cutlass_dsl": "4.6.1"}, "FP8 backward"),
        ({"cutlass_dsl": "4.7.0"}, "needs nvidia-cutlass-dsl 4.8"),
        ({"precision": "bf16"}, "precision=bf16"),
        ({"hybrid_format": True}, "HYBRID"),
        ({"hidden": 4064}, "hidden=4064"),
        ({"ffn": 100}, "ffn=100"),
        ({"deterministic": True}, "atomics"),
    ],
)
def test_each_unmet_condition_is_named(change: dict[str, Any], word: str) -> None:
    problems = fused_mlp_problems(replace(BLACKWELL, **change))
    assert len(problems) == 1
    assert word in problems[0]


def test_all_unmet_conditions_are_listed_together() -> None:
    worst = replace(
        BLACKWELL,
        capability=(9, 0),
        switch_set=False,
        frontend=None,
        cutlass_dsl=None,
        precision="bf16",
        hidden=100,
        deterministic=True,
    )
    assert len(fused_mlp_problems(worst)) == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_a_machine_without_a_gpu_lacks_at_least_the_gpu() -> None:
    problems = fused_mlp_problems(fused_mlp_facts(torch.device("cpu"), "mxfp8", 4096, 14336))
    assert any("no CUDA device" in problem for problem in problems)


@pytest.mark.parametrize(("text", "numbers"), [("4.8.0.dev1", (4, 8, 0)), ("1.32", (1, 32)), ("x", ())])
def test_versions_are_compared_by_their_leading_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_tuple(text) == numbers
