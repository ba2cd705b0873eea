"""What a training benchmark runs: a preset or a recipe, cut to the tokens that one GPU takes in a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout
from isozyme.launch.compose import compose, recipe_names
from isozyme.models.presets import PRESETS

WORKLOADS: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {
        "mixtral8x7b-4L": ("mixtral_8x7b", 4, 4096),
        "genomic-8L": ("genomic_1b", 8, 16_384),
    }
)
"""Named workloads: preset, layers, tokens a GPU in a step."""

PEAKS: Mapping[str, float] = MappingProxyType(
    {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "B200": 2250e12}
)
"""Dense bf16 operations a second of NVIDIA's data sheets (SXM), which MFU is measured against."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A recipe with overrides, from which every process composes the same run."""

    recipe: str
    overrides: tuple[str, ...]

    def config(self, *more: str) -> RunConfig:
        """The run, with further overrides."""
        return compose(self.recipe, [*self.overrides, *more])


def workload(
    name: str,
    *,
    world_size: int,
    layers: int | None = None,
    tokens_per_gpu: int | None = None,
    layout: str | None = None,
    overrides: Sequence[str] = (),
) -> Workload:
    """Make the workload.

    Args:
        name: one of `WORKLOADS`, a preset, or a recipe.
        world_size: the number of ranks.
        layers: depth, if not the model's own.
        tokens_per_gpu: tokens of one rank in one step, whole windows; by default one window. A dense replica
            takes those of all its ranks in one micro-batch, or in as many as `train.micro_batch` makes.
        layout: as on the command line; by default dp over all ranks, and ep as large as the experts allow.
        overrides: further `key=value`; they have the last word.

    Raises:
        ConfigError: if the name is unknown, the tokens are not whole windows, or an override has no effect.
    """
    refuse_given(overrides, {"precision": "--precisions", "model.moe.experts": "--backends"})
    recipe, given = name, ["optim.implementation=torch"]
    if name in WORKLOADS:
        preset, depth, tokens = WORKLOADS[name]
        recipe, layers, tokens_per_gpu = "L0_sanity", layers or depth, tokens_per_gpu or tokens
        given.insert(0, f"preset={preset}")
    elif name in PRESETS:
        recipe = "L0_sanity"
        given.insert(0, f"preset={name}")
    elif "/" not in name and not name.endswith((".yaml", ".yml")) and name not in recipe_names():
        known = [*WORKLOADS, *PRESETS, *recipe_names()]
        raise ConfigError(f"unknown workload: {name}. Choose from {', '.join(known)}, or a YAML file.")
    if layers is not None:
        given.append(f"model.num_layers={layers}")
    given += ["name=bench", "optim.clip=1.0", "optim.warmup_steps=0", "data.overlap=0"]
    sizes_only = [each for each in overrides if not each.startswith("train.")]
    base = compose(recipe, [*given, *sizes_only])  # layout and batch come below
    window = base.data.window
    tokens = tokens_per_gpu or window
    if tokens % window:
        raise ConfigError(
            f"a rank takes whole windows: --tokens-per-gpu={tokens}, data.window={window}; "
            f"{tokens} % {window} = {tokens % window}. Use a multiple of {window}, or set data.window."
        )
    windows = tokens // window
    sizes = layout.split() if layout else [
        f"dp={world_size}", f"ep={math.gcd(world_size, base.model.moe.router.num_experts)}"
    ]  # fmt: skip
    axes = dict(part.partition("=")[::2] for part in sizes)
    given += [f"layout.{axis}={size}" for axis, size in axes.items()]
    replicas = _replicas(axes)
    given += [
        f"train.micro_batch={windows * world_size // replicas}",
        f"train.global_batch={windows * world_size}",
    ]
    return Workload(recipe=recipe, overrides=(*given, *overrides))


def refuse_given(overrides: Sequence[str], options: Mapping[str, str]) -> None:
    """Refuse settings that the benchmark itself makes, as they would have no effect.

    Args:
        overrides: `key=value`, as they were typed.
        options: the settings, and for each what to use instead.

    Raises:
        ConfigError: if there is one.
    """
    for each in overrides:
        key = each.partition("=")[0]
        if key in options:
            raise ConfigError(f"the benchmark sets {key} by itself: {each}. Use {options[key]}.")


def _replicas(axes: Mapping[str, str]) -> int:
    """The dense replicas of a layout as it was typed; what is wrong with it is said when it is composed."""
    known = ("tp", "cp", "dp", "pp", "ep", "etp")
    sizes: dict[str, Any] = {
        axis: int(axes[axis]) for axis in known if axes.get(axis, "0").strip("0").isdigit()
    }
    return Layout(**sizes).resolved().dp or 1


def peak_flops(gpu: str | None) -> float | None:
    """The data sheet's bf16 rate of a GPU by its name; None if it is not known here.

    >>> peak_flops("NVIDIA H200") / 1e12
    989.4
    """
    return next((rate for name, rate in PEAKS.items() if gpu is not None and name in gpu), None)
