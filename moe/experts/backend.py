"""What an expert backend says of itself: where it runs, how it is built, and what it can do besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from isozyme.core.config import Precision
from isozyme.core.precision import TRAITS
from isozyme.moe.experts.storage import ExpertWeights
from isozyme.moe.types import ArrivalFunction, ExpertFunction


@dataclass(frozen=True, kw_only=True)
class ExpertSetting:
    """What a backend must know to say whether it can run: one rank's experts, and where they are."""

    device: torch.device
    dtype: torch.dtype
    """Type of rows and weights."""
    num_local_experts: int
    hidden: int
    ffn: int
    """This rank's share of F."""
    precision: Precision | None = None
    """The precision of the GEMMs; that of `dtype` if None."""
    recompute: bool = False
    """Whether the activation is made a second time in backward, by backends that would keep it."""
    delay_wgrad: bool = False
    """Whether the function is called with `delayed=…` too, and leaves its weights' gradients there."""
    cache_quantized: bool = False
    """Whether quantised weights are kept over the micro-batches of a step."""

    @property
    def gemm_precision(self) -> Precision:
        """The precision of the GEMMs, by name."""
        if self.precision is not None:
            return self.precision
        by_dtype: dict[torch.dtype, Precision] = {torch.float64: "fp64", torch.bfloat16: "bf16"}
        return by_dtype.get(self.dtype, "fp32")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute experts."""

    name: str
    problems: Callable[[ExpertSetting], list[str]]
    """Every unmet condition in words; empty if the backend runs."""
    build: Callable[[ExpertSetting, ExpertWeights], ExpertFunction | ArrivalFunction]
    """Make the function for one layer. It may keep buffers of its own, and modules that share the weights."""
    groups_rows: bool = False
    """Whether the function is an `ArrivalFunction`, which groups the rows itself."""
    suits: Callable[[ExpertSetting], bool] = lambda _setting: True
    """Whether `auto` considers it at all for such experts; a backend asked for by name need not suit."""
    cannot_delay: str | None = "it computes all gradients at once"
    """Why it cannot leave its weights' gradients for later; None if it can."""
    quantizes_weights: bool = False
    """Whether it can keep quantised weights over micro-batches, in a precision that quantises."""
    only_precision: Precision | None = None
    """The one that it computes in, where that is none of the plain types."""

    def unmet(self, setting: ExpertSetting) -> list[str]:
        """Every unmet condition, those of the setting's options included."""
        found = self.problems(setting)
        if setting.delay_wgrad and self.cannot_delay is not None:
            found = [*found, f"{self.cannot_delay}: set model.moe.delay_wgrad=false"]
        if setting.cache_quantized and not (
            self.quantizes_weights and TRAITS[setting.gemm_precision].quantized
        ):
            found = [
                *found,
                f"in {setting.gemm_precision} it keeps no quantised weights: set "
                "model.moe.cache_quantized_weights=false",
            ]
        return found
