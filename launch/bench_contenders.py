"""What takes part in a layer benchmark: our expert backends, through the path that training takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isozyme.core.config import Precision
from isozyme.core.errors import ConfigError, did_you_mean
from isozyme.core.precision import TRAITS
from isozyme.launch.bench_problem import (
    Built,
    Contender,
    Problem,
    parameters_by_expert,
)
from isozyme.moe.dispatch_local import LocalDispatcher
from isozyme.moe.experts.experts import Experts
from isozyme.moe.experts.registry import BACKENDS
from isozyme.moe.types import Routing


def storage_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The type of tokens and weights for a precision; the emulation runs on fp32 on a CPU."""
    if precision == "mxfp8_emulated" and device.type == "cpu":
        return torch.float32
    return TRAITS[precision].dtype


def our_contender(backend: str, precision: Precision) -> Contender:
    """One backend of the registry in one precision, with the permutation and its inverse."""

    def build(problem: Problem) -> Built:
        experts = Experts.over(problem.weights, backend=backend, precision=precision)
        dispatcher = LocalDispatcher()
        routing = Routing(
            topk_ids=problem.topk_ids,
            topk_probs=problem.topk_probs,
            kept=torch.ones_like(problem.topk_ids, dtype=torch.bool),
            num_experts=problem.shape.num_experts,
        )

        def forward() -> Tensor:
            arrival = dispatcher.send(problem.tokens, routing)
            return dispatcher.bring_back(experts.on_arrival(arrival), arrival)

        return Built(
            forward=forward,
            inputs={"d_tokens": problem.tokens, "d_probs": problem.topk_probs},
            weights=[*problem.weights.gate_up, *problem.weights.down],
            weight_gradients=parameters_by_expert,
        )

    return Contender(name=backend, kind="isozyme", precision=precision, build=build)


def our_contenders(backends: Sequence[str], precisions: Sequence[str]) -> list[Contender]:
    """The contenders that the command line names.

    Args:
        backends: `te@fp8_current` is one backend in one precision; `te` alone is taken in each of
            `precisions`, and a backend that has one precision of its own (`grouped_fp8`) in that.
        precisions: names of `isozyme.core.config.Precision`.

    Raises:
        ConfigError: if a name is unknown.
    """
    known = [each.name for each in BACKENDS]
    found: list[Contender] = []
    for text in backends:
        name, at, precision = text.partition("@")
        if name not in known:
            raise ConfigError(f"unknown expert backend: --backends={text}. {did_you_mean(name, known)}")
        for each in [precision] if at else precisions_of(name, precisions):
            if each not in TRAITS:
                raise ConfigError(f"unknown precision: {each}. {did_you_mean(each, TRAITS)}")
            contender = our_contender(name, each)
            if (contender.name, contender.precision) not in [(c.name, c.precision) for c in found]:
                found.append(contender)
    return found


def precisions_of(backend: str, precisions: Sequence[str]) -> Sequence[str]:
    """The one precision that a backend of this name has, or else those given."""
    only = next((each.only_precision for each in BACKENDS if each.name == backend), None)
    return precisions if only is None else [only]


def default_backends(device: torch.device) -> list[str]:
    """What is measured if nothing is named: every backend that fits the device, with its precisions."""
    if device.type == "cuda":
        plain = ["loop", "grouped_mm", "grouped_mm_fused", "te", "te_ops"]
        return [*plain, "grouped_fp8", "te@fp8_current", "te@fp8_block", "te_fused@mxfp8"]
    return ["loop", "grouped_mm", "grouped_mm_fused", "grouped_fp8", "mxfp8_emulated"]


def default_precision(device: torch.device) -> Precision:
    """bf16 on a GPU, fp32 on a CPU."""
    return "bf16" if device.type == "cuda" else "fp32"
