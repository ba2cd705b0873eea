"""Probes of optional accelerated parts: each gives the part itself, or says why it cannot be used here.

NVIDIA's apex is a source build (the package called `apex` on PyPI is an unrelated web toolkit), so what is
probed is the very thing that is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from isozyme.core import transformer_engine


@dataclass(frozen=True)
class Probe:
    """The result of looking for one optional part: exactly one of the two fields is set."""

    part: Callable[..., Any] | None
    why_not: str | None


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
