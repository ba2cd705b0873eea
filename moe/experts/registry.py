"""The table of expert backends, and the choice among them.

A backend says in words what keeps it from running here. One that the user named runs, or an error lists every
unmet condition; `auto` takes the first of the table that can run, and says why not those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isozyme.core.config import Precision
from isozyme.core.errors import BackendError, did_you_mean
from isozyme.moe.experts.grouped_mm import grouped_mm_experts, grouped_mm_problems
from isozyme.moe.experts.loop import loop_experts
from isozyme.moe.experts.storage import ExpertWeights
from isozyme.moe.types import ExpertFunction


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


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute experts."""

    name: str
    problems: Callable[[ExpertSetting], list[str]]
    """Every unmet condition in words; empty if the backend runs."""
    build: Callable[[ExpertSetting, ExpertWeights], ExpertFunction]
    """Make the function for one layer. It may keep buffers of its own, and modules that share the weights."""


def _plain_precision(setting: ExpertSetting) -> list[str]:
    if setting.precision in (None, "fp64", "fp32", "bf16"):
        return []
    return [f"it multiplies in the dtype of its inputs, not in {setting.precision}"]


def _grouped_mm_problems(setting: ExpertSetting) -> list[str]:
    return [
        *grouped_mm_problems(setting.device, setting.dtype, setting.hidden, setting.ffn),
        *_plain_precision(setting),
    ]


GROUPED_MM = Backend(
    name="grouped_mm",
    problems=_grouped_mm_problems,
    build=lambda _setting, _weights: grouped_mm_experts,
)
LOOP = Backend(name="loop", problems=_plain_precision, build=lambda _setting, _weights: loop_experts)

BACKENDS: tuple[Backend, ...] = (GROUPED_MM, LOOP)
"""All backends, in the order in which `auto` tries them: the fastest first."""


def choose_backend(
    name: str, setting: ExpertSetting, backends: Sequence[Backend] = BACKENDS
) -> tuple[Backend, str]:
    """The backend that runs, and why that one.

    Args:
        name: the name of a backend, or `auto`.
        setting: where it shall run.
        backends: the table, in the order in which `auto` tries it.

    Returns:
        The backend, and a sentence such as `auto chose loop (grouped_mm cannot run: it multiplies …)`.

    Raises:
        BackendError: if there is no such backend, or it (with `auto`: every one) cannot run here.

    >>> cpu = ExpertSetting(
    ...     device=torch.device("cpu"), dtype=torch.float64, num_local_experts=4, hidden=8, ffn=8
    ... )
    >>> choose_backend("auto", cpu)[1]
    'auto chose loop (grouped_mm cannot run: it multiplies float32, bfloat16, float16, not float64)'
    """
    if name != "auto":
        found = next((backend for backend in backends if backend.name == name), None)
        if found is None:
            known = ["auto", *(backend.name for backend in backends)]
            raise BackendError(f"unknown expert backend: experts={name}. {did_you_mean(name, known)}")
        unmet = found.problems(setting)
        if unmet:
            lines = "".join(f"\n  - {each}" for each in unmet)
            raise BackendError(f"experts={name} cannot run here:{lines}\nUse experts=auto, or change these.")
        return found, f"{name}, as asked"
    refusals: list[str] = []
    for backend in backends:
        unmet = backend.problems(setting)
        if not unmet:
            why = f" ({'; '.join(refusals)})" if refusals else ""
            return backend, f"auto chose {backend.name}{why}"
        refusals.append(f"{backend.name} cannot run: {', '.join(unmet)}")
    lines = "".join(f"\n  - {each}" for each in refusals)
    raise BackendError(f"experts=auto: no backend can run here:{lines}")
