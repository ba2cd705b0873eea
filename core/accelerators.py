"""Probes of optional accelerated parts: each gives the part itself, or says why it cannot be used here.

`Choice` says which one was taken.

NVIDIA's apex is a source build (the package called `apex` on PyPI is an unrelated web toolkit), so what is
probed is the very thing that is needed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isozyme.core import transformer_engine


@dataclass(frozen=True)
class Probe:
    """The result of looking for one optional part: exactly one of the two fields is set."""

    part: Callable[..., Any] | None
    why_not: str | None


@dataclass(frozen=True)
class Choice:
    """Which implementation runs, and why not the others."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@functools.cache
def te_fused_adam() -> Probe:
    """Transformer Engine's `FusedAdam`."""
    reason = transformer_engine.why_not()
    if reason is not None:
        return Probe(None, reason)
    return Probe(transformer_engine.load().optimizers.FusedAdam, None)


@functools.cache
def apex_fused_adam() -> Probe:
    """The `FusedAdam` of NVIDIA's apex."""
    if not torch.cuda.is_available():
        return Probe(None, "apex needs a CUDA device: torch.cuda.is_available() is False")
    try:
        from apex.optimizers import FusedAdam  # type: ignore[import-not-found, unused-ignore]
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return Probe(None, f"from apex.optimizers import FusedAdam failed: {type(error).__name__}: {error}")
    return Probe(FusedAdam, None)


@functools.cache
def te_rms_norm() -> Probe:
    """Transformer Engine's RMS norm: `(x, weight, eps) → y`, as an operation of the graph."""
    reason = transformer_engine.why_not()
    if reason is not None:
        return Probe(None, reason)
    missing = [
        name for name in ("rmsnorm_fwd", "rmsnorm_bwd") if not hasattr(transformer_engine.kernels(), name)
    ]
    if missing:
        return Probe(None, f"this Transformer Engine has no {' and no '.join(missing)}")
    return Probe(transformer_engine.rms_norm, None)


@functools.cache
def apex_rms_norm() -> Probe:
    """The RMS norm of NVIDIA's apex: `(x, weight, eps) → y`, as an operation of the graph."""
    if not torch.cuda.is_available():
        return Probe(None, "apex needs a CUDA device: torch.cuda.is_available() is False")
    wanted = "from apex.normalization.fused_layer_norm import fused_rms_norm_affine"
    try:
        from apex.normalization.fused_layer_norm import (  # type: ignore[import-not-found, unused-ignore]
            fused_rms_norm_affine,
        )

        importlib.import_module("fused_layer_norm_cuda")  # apex itself asks for it at the first call only
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return Probe(None, f"{wanted} failed: {type(error).__name__}: {error}")

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = fused_rms_norm_affine(x, weight, tuple(weight.shape), eps)
        return out

    return Probe(norm, None)
