"""The table of expert backends, and the choice among them.

A backend says in words what keeps it from running here. One that the user named runs, or an error lists every
unmet condition. `auto` takes the one that was measured to be the fastest, where something was measured on
this kind of GPU, else the first of the table that can run; and it says why, and why not the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from isozyme.core.errors import BackendError, did_you_mean
from isozyme.core.precision import precision_problems
from isozyme.moe.experts.backend import Backend as Backend
from isozyme.moe.experts.backend import ExpertSetting as ExpertSetting
from isozyme.moe.experts.fused_mlp_conditions import INTERLEAVE, fused_mlp_facts, fused_mlp_problems
from isozyme.moe.experts.grouped_fp8 import (
    CachingFP8Experts,
    grouped_fp8_experts,
    grouped_fp8_problems,
)
from isozyme.moe.experts.grouped_mm import grouped_mm_experts, grouped_mm_problems
from isozyme.moe.experts.grouped_mm_fused import grouped_mm_fused_experts, grouped_mm_fused_problems
from isozyme.moe.experts.loop import loop_experts
from isozyme.moe.experts.measured import MeasuredTable, Measurement, Shape, measured_on
from isozyme.moe.experts.mxfp8_emulated import mxfp8_emulated_experts, mxfp8_emulated_problems
from isozyme.moe.experts.te import TEExperts, te_problems
from isozyme.moe.experts.te_fused import TEFusedExperts


def _plain_precision(setting: ExpertSetting) -> list[str]:
    if setting.precision in (None, "fp64", "fp32", "bf16"):
        return []
    return [f"it multiplies in the dtype of its inputs, not in {setting.precision}"]


def _grouped_mm_problems(setting: ExpertSetting) -> list[str]:
    return [
        *grouped_mm_problems(setting.device, setting.dtype, setting.hidden, setting.ffn),
        *_plain_precision(setting),
    ]


def _grouped_mm_fused_problems(setting: ExpertSetting) -> list[str]:
    return [
        *_grouped_mm_problems(setting),
        *grouped_mm_fused_problems(setting.device, setting.num_local_experts),
    ]


def _te_problems(setting: ExpertSetting) -> list[str]:
    return te_problems(setting.device, setting.dtype, setting.hidden, setting.ffn, setting.gemm_precision)


def _te_ops_problems(setting: ExpertSetting) -> list[str]:
    found = _te_problems(setting)
    if setting.precision not in (None, "bf16", "fp32"):
        found.append(f"it runs un-fused in bf16 or fp32, not in {setting.precision}: use experts=te_fused")
    if setting.ffn % INTERLEAVE:
        found.append(f"ffn must be a multiple of {INTERLEAVE}: ffn={setting.ffn}")
    return found


def _te_fused_problems(setting: ExpertSetting) -> list[str]:
    return fused_mlp_problems(
        fused_mlp_facts(setting.device, setting.gemm_precision, setting.hidden, setting.ffn)
    )


def _mxfp8_emulated_problems(setting: ExpertSetting) -> list[str]:
    found = mxfp8_emulated_problems(setting.hidden, setting.ffn)
    if setting.precision not in (None, "mxfp8_emulated"):
        found.append(f"it emulates MXFP8: precision={setting.precision}. Set precision=mxfp8_emulated")
    return found


def _grouped_fp8_problems(setting: ExpertSetting) -> list[str]:
    on_cuda = setting.device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(setting.device) if on_cuda else None
    found = [
        *grouped_fp8_problems(setting.device, setting.dtype, setting.hidden, setting.ffn),
        *grouped_mm_fused_problems(setting.device, setting.num_local_experts),
        *precision_problems("fp8_rowwise", capability),
    ]
    if setting.precision != "fp8_rowwise":
        found.append(
            f"it multiplies 8-bit rows: precision={setting.gemm_precision}. Set precision=fp8_rowwise"
        )
    return found


def _on_cuda(setting: ExpertSetting) -> bool:
    return setting.device.type == "cuda"


GROUPED_MM_FUSED = Backend(
    name="grouped_mm_fused",
    suits=_on_cuda,  # on a CPU the kernels' plain twins run, which `grouped_mm` does in fewer passes
    problems=_grouped_mm_fused_problems,
    build=lambda _setting, _weights: grouped_mm_fused_experts,
    groups_rows=True,
    cannot_delay=None,
)
GROUPED_FP8 = Backend(
    name="grouped_fp8",
    suits=lambda setting: setting.precision == "fp8_rowwise",
    problems=_grouped_fp8_problems,
    build=lambda setting, weights: (
        CachingFP8Experts(weights) if setting.cache_quantized else grouped_fp8_experts
    ),
    groups_rows=True,
    cannot_delay=None,
    quantizes_weights=True,
    only_precision="fp8_rowwise",
)
GROUPED_MM = Backend(
    name="grouped_mm",
    problems=_grouped_mm_problems,
    build=lambda setting, _weights: partial(grouped_mm_experts, recompute=setting.recompute),
    cannot_delay=None,
)
LOOP = Backend(
    name="loop",
    problems=_plain_precision,
    build=lambda setting, _weights: partial(loop_experts, recompute=setting.recompute),
    cannot_delay=None,
)
TE = Backend(
    name="te",
    suits=_on_cuda,
    problems=_te_problems,
    build=lambda setting, weights: TEExperts(
        weights,
        setting.gemm_precision,
        delay_wgrad=setting.delay_wgrad,
        cache_quantized=setting.cache_quantized,
    ),
    groups_rows=True,
    quantizes_weights=True,
    cannot_delay=None,
)
TE_FUSED = Backend(
    name="te_fused",
    suits=lambda setting: _on_cuda(setting) and setting.precision == "mxfp8",
    problems=_te_fused_problems,
    build=lambda setting, weights: TEFusedExperts(weights, setting.gemm_precision, require_fused=True),
    groups_rows=True,
    cannot_delay="its module computes the gradients of rows and weights in one call",
)
TE_OPS = Backend(
    name="te_ops",
    suits=lambda _setting: False,  # there to test the module of `te_fused` where its kernel cannot run
    problems=_te_ops_problems,
    build=lambda setting, weights: TEFusedExperts(weights, setting.gemm_precision, require_fused=False),
    groups_rows=True,
    cannot_delay="its module computes the gradients of rows and weights in one call",
)
MXFP8_EMULATED = Backend(
    name="mxfp8_emulated",
    suits=lambda setting: setting.precision == "mxfp8_emulated",
    problems=_mxfp8_emulated_problems,
    build=lambda setting, _weights: partial(mxfp8_emulated_experts, recompute=setting.recompute),
    cannot_delay="its emulated product computes both gradients at once",
    only_precision="mxfp8_emulated",
)

BACKENDS: tuple[Backend, ...] = (
    TE_FUSED,
    GROUPED_MM_FUSED,
    GROUPED_FP8,
    TE,
    GROUPED_MM,
    LOOP,
    MXFP8_EMULATED,
    TE_OPS,
)
"""All backends, in the order in which `auto` tries them where nothing was measured."""


def choose_backend(
    name: str,
    setting: ExpertSetting,
    backends: Sequence[Backend] = BACKENDS,
    measured: MeasuredTable | None = None,
) -> tuple[Backend, str]:
    """The backend that runs, and why that one.

    Args:
        name: the name of a backend, or `auto`.
        setting: where it shall run.
        backends: the table, in the order in which `auto` tries it.
        measured: times on this kind of GPU; by default those that come with the package, if it has any. The
            shape in them counts that is nearest to the setting's, and of backends only those in them.

    Returns:
        The backend, and a sentence such as `auto chose loop (grouped_mm cannot run: it multiplies …)` or
        `auto chose te (measured fastest at h=4096 …, fp8_current, NVIDIA H200: 19.58 ms)`.

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
        unmet = found.unmet(setting)
        if unmet:
            lines = "".join(f"\n  - {each}" for each in unmet)
            raise BackendError(f"experts={name} cannot run here:{lines}\nUse experts=auto, or change these.")
        return found, f"{name}, as asked"
    return _choose_automatically(setting, backends, measured or measured_on(setting.device))


def _choose_automatically(
    setting: ExpertSetting, backends: Sequence[Backend], table: MeasuredTable | None
) -> tuple[Backend, str]:
    considered = [backend for backend in backends if backend.suits(setting)]
    unmet = {backend.name: backend.unmet(setting) for backend in considered}
    refusals = {name: f"{name} cannot run: {', '.join(found)}" for name, found in unmet.items() if found}
    usable = [backend for backend in considered if not unmet[backend.name]]
    if not usable:
        lines = "".join(f"\n  - {each}" for each in refusals.values())
        raise BackendError(f"experts=auto: no backend can run here:{lines}")
    nearest = None if table is None else table.nearest(setting.gemm_precision, _shape_of(setting))
    if table is not None and nearest is not None and any(each.name in nearest.ms for each in usable):
        best = min(usable, key=lambda each: nearest.ms.get(each.name, math.inf))
        plain = table.nearest("bf16", nearest.shape)
        reasons = [_measured_words(best, usable, nearest, plain, table.gpu), *refusals.values()]
    else:
        best = usable[0]
        before = [each.name for each in considered[: considered.index(best)]]
        reasons = [refusals[name] for name in before]
        if setting.device.type == "cuda":
            reasons.append(f"in {setting.gemm_precision} none of them was measured on this kind of GPU")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return best, f"auto chose {best.name}{why}"


def _shape_of(setting: ExpertSetting) -> Shape:
    return Shape(hidden=setting.hidden, ffn=setting.ffn, num_local_experts=setting.num_local_experts)


def _measured_words(
    best: Backend, usable: Sequence[Backend], found: Measurement, plain: Measurement | None, gpu: str
) -> str:
    """`measured fastest at h=4096 … , bf16, NVIDIA H200: 27.53 ms; te 27.64`, and whether bf16 is faster."""
    others = [each.name for each in usable if each.name in found.ms and each is not best]
    times = [f"{found.ms[best.name]:.2f} ms", *(f"{name} {found.ms[name]:.2f}" for name in others)]
    if plain is not None and plain.shape == found.shape:
        name = min(plain.ms, key=plain.ms.__getitem__)
        if plain.ms[name] < found.ms[best.name]:
            times.append(f"precision=bf16 is faster there: {name} {plain.ms[name]:.2f}")
    return f"measured fastest at {found.shape}, {found.precision}, {gpu}: {'; '.join(times)}"
