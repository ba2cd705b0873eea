"""The one `precision` setting: what it stores, what it multiplies in, and what hardware it needs.

Every condition is a pure function of facts about the machine, so that each refusal is tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isozyme.core.config import Precision


@dataclass(frozen=True, kw_only=True)
class PrecisionTraits:
    """What one precision asks for."""

    dtype: torch.dtype
    """Type in which parameters and activations are stored."""
    row_alignment: int = 1
    """Rows per expert must be a multiple of this for the quantised GEMMs."""
    feature_alignment: int = 1
    """Both dims of an expert's weights must be a multiple of this."""
    quantized: bool = False
    """Whether GEMMs run on quantised operands."""


TRAITS: dict[Precision, PrecisionTraits] = {
    "fp64": PrecisionTraits(dtype=torch.float64),
    "fp32": PrecisionTraits(dtype=torch.float32),
    "bf16": PrecisionTraits(dtype=torch.bfloat16),
    "fp8_current": PrecisionTraits(
        dtype=torch.bfloat16, row_alignment=16, feature_alignment=16, quantized=True
    ),
    "fp8_delayed": PrecisionTraits(
        dtype=torch.bfloat16, row_alignment=16, feature_alignment=16, quantized=True
    ),
    "fp8_block": PrecisionTraits(
        dtype=torch.bfloat16, row_alignment=32, feature_alignment=16, quantized=True
    ),
    "mxfp8": PrecisionTraits(dtype=torch.bfloat16, row_alignment=32, feature_alignment=32, quantized=True),
    "mxfp8_emulated": PrecisionTraits(dtype=torch.bfloat16, feature_alignment=32, quantized=True),
}
"""Every precision. `mxfp8_emulated` may also be stored in fp32: the emulation quantises from what it gets."""


def precision_problems(precision: Precision, capability: tuple[int, int] | None) -> list[str]:
    """Why a precision cannot run on a device, in words; empty if it can.

    Args:
        precision: the setting.
        capability: compute capability of the CUDA device, or None without one.

    >>> precision_problems("mxfp8", (9, 0))
    ['precision=mxfp8 needs compute capability 10.0 to 11.x (Blackwell), this GPU has 9.0']
    >>> precision_problems("mxfp8_emulated", None)
    []
    """
    if not precision.startswith(("fp8", "mxfp8")) or precision == "mxfp8_emulated":
        return []
    if capability is None:
        return [f"precision={precision} needs a CUDA device, and there is none"]
    found = f"this GPU has {capability[0]}.{capability[1]}"
    if precision == "mxfp8" and not (10, 0) <= capability < (12, 0):
        return [f"precision=mxfp8 needs compute capability 10.0 to 11.x (Blackwell), {found}"]
    if precision == "fp8_block" and capability < (9, 0):
        return [f"precision=fp8_block needs compute capability 9.0 (Hopper) or later, {found}"]
    if capability < (8, 9):
        return [f"precision={precision} needs compute capability 8.9 (Ada) or later, {found}"]
    return []
