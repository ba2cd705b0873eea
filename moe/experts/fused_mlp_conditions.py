"""When Transformer Engine's fused grouped MLP runs: one pure function, tested for each condition on a CPU.

Upstream, anything unmet is a silent fall-back to separate kernels. Here it is an error with every reason.
The conditions were read from Transformer Engine 2.14 to 2.20 (`pytorch/ops/fused/grouped_mlp.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata

import torch

from isozyme.core import transformer_engine
from isozyme.core.config import Precision
from isozyme.core.transformer_engine import FUSED_GROUPED_MLP_SWITCH

INTERLEAVE = 32
"""Rows of gate and of up that alternate in the kernel's weight layout."""
ROW_ALIGNMENT = 256
"""Rows of each expert must be a multiple of this for the kernel."""
FEATURE_ALIGNMENT = 64
CLASS_NAMES = ("GroupedMLP_CuTeGEMMGLU", "ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8")
"""The fused operation in `te.ops.fused`: from 2.17 on, and in 2.14 to 2.16."""
_MIN_FRONTEND = (1, 23)


@dataclass(frozen=True, kw_only=True)
class FusedMLPFacts:
    """What decides whether the fused kernel runs."""

    te_reason: str | None
    """Why Transformer Engine cannot be used at all, or None."""
    has_class: bool
    """Whether this release has the fused operation."""
    capability: tuple[int, int] | None
    switch_set: bool
    """Whether the environment switch was set before Transformer Engine was imported."""
    frontend: str | None
    """Version of nvidia-cudnn-frontend, or None."""
    cutlass_dsl: str | None
    """Version of nvidia-cutlass-dsl, or None."""
    precision: Precision
    hybrid_format: bool
    """Whether the recipe keeps gradients in E5M2 (`Format.HYBRID`)."""
    hidden: int
    ffn: int
    deterministic: bool
    """Whether deterministic algorithms were asked for."""


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> version_tuple("4.8.0.dev1"), version_tuple("1.32")
    ((4, 8, 0), (1, 32))
    """
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def fused_mlp_problems(facts: FusedMLPFacts) -> list[str]:
    """Every unmet condition of the fused MXFP8 grouped MLP, in words; empty if the kernel will run."""
    found = []
    if facts.te_reason is not None:
        found.append(facts.te_reason)
    elif not facts.has_class:
        found.append(f"this Transformer Engine has none of {', '.join(CLASS_NAMES)}; use 2.17 or later")
    if facts.capability is None:
        found.append(
            "the kernel needs a Blackwell GPU (compute capability 10.x), and there is no CUDA device"
        )
    elif facts.capability[0] != 10:
        major, minor = facts.capability
        found.append(f"the kernel needs compute capability 10.x (Blackwell), this GPU has {major}.{minor}")
    if not facts.switch_set:
        found.append(f"{FUSED_GROUPED_MLP_SWITCH}=1 was not set before Transformer Engine was imported")
    found += _package_problems(facts)
    if facts.precision != "mxfp8":
        found.append(f"the kernel computes in MXFP8: precision={facts.precision}. Set precision=mxfp8")
    if facts.hybrid_format:
        found.append("the recipe's format is HYBRID (E5M2 gradients); the kernel takes E4M3 only")
    for name, size in (("hidden", facts.hidden), ("ffn", facts.ffn)):
        if size % FEATURE_ALIGNMENT:
            found.append(f"{name} must be a multiple of {FEATURE_ALIGNMENT}: {name}={size}")
    if facts.deterministic:
        found.append("its backward uses atomics, and deterministic algorithms were asked for")
    return found


def _package_problems(facts: FusedMLPFacts) -> list[str]:
    found = []
    if facts.frontend is None:
        found.append("nvidia-cudnn-frontend is not installed (1.23 or later is needed)")
    elif version_tuple(facts.frontend) < _MIN_FRONTEND:
        found.append(f"nvidia-cudnn-frontend must be 1.23 or later: it is {facts.frontend}")
    if facts.cutlass_dsl is None:
        found.append("nvidia-cutlass-dsl is not installed")
    else:
        dsl = version_tuple(facts.cutlass_dsl)
        if (4, 6, 0) <= dsl <= (4, 6, 1):
            found.append(
                f"nvidia-cutlass-dsl {facts.cutlass_dsl} fails on the FP8 backward; use 4.8 or later"
            )
        elif facts.frontend is not None and version_tuple(facts.frontend) >= (1, 32) and dsl < (4, 8):
            found.append(
                f"nvidia-cudnn-frontend {facts.frontend} needs nvidia-cutlass-dsl 4.8 or later: "
                f"it is {facts.cutlass_dsl}"
            )
    return found


def fused_mlp_facts(device: torch.device, precision: Precision, hidden: int, ffn: int) -> FusedMLPFacts:
    """The facts of this machine, for experts of the given sizes (`ffn` is this rank's share of F)."""
    on_cuda = device.type == "cuda" and torch.cuda.is_available()
    reason = transformer_engine.why_not()
    return FusedMLPFacts(
        te_reason=reason,
        has_class=reason is None and fused_class() is not None,
        capability=torch.cuda.get_device_capability(device) if on_cuda else None,
        switch_set=transformer_engine.fused_switch_is_set(),
        frontend=_installed("nvidia-cudnn-frontend"),
        cutlass_dsl=_installed("nvidia-cutlass-dsl"),
        precision=precision,
        hybrid_format=False,
        hidden=hidden,
        ffn=ffn,
        deterministic=torch.are_deterministic_algorithms_enabled()
        or os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0",
    )


def fused_class() -> type | None:
    """The fused operation of the installed release, whatever its name, or None."""
    fused = transformer_engine.load().ops.fused
    return next((getattr(fused, name) for name in CLASS_NAMES if hasattr(fused, name)), None)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
