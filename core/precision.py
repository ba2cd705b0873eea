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
    "fp8_rowwise": PrecisionTraits(dtype=torch.bfloat16, feature_alignment=16, quantized=True),
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
NEEDS_TRANSFORMER_ENGINE: tuple[Precision, ...] = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8")
"""What nothing else multiplies in. The other quantised precisions run on a CPU too, emulated."""


def precision_problems(precision: Precision, capability: tuple[int, int] | None) -> list[str]:
    """Why a precision cannot run on a device, in words; empty if it can.

    Args:
        precision: the setting.
        capability: compute capability of the CUDA device, or None without one (then `fp8_rowwise` is
            emulated, as `mxfp8_emulated` is everywhere).

    >>> precision_problems("mxfp8", (9, 0))
    ['precision=mxfp8 needs a GPU of compute capability 10.0 to 11.x (Blackwell), and this GPU has 9.0']
    >>> precision_problems("fp8_rowwise", (8, 9))
    ['precision=fp8_rowwise needs a GPU of compute capability 9.x (Hopper), and this GPU has 8.9']
    >>> precision_problems("fp8_rowwise", None), precision_problems("mxfp8_emulated", None)
    ([], [])
    """
    if not TRAITS[precision].quantized or precision == "mxfp8_emulated":
        return []
    if precision == "fp8_rowwise" and capability is None:
        return []
    lowest, highest, words = {
        "mxfp8": ((10, 0), (11, 99), "10.0 to 11.x (Blackwell)"),
        # torch's grouped product of rows with scales of their own is built for Hopper alone.
        "fp8_rowwise": ((9, 0), (9, 99), "9.x (Hopper)"),
        "fp8_block": ((9, 0), (99, 0), "9.0 (Hopper) or later"),
    }.get(precision, ((8, 9), (99, 0), "8.9 (Ada) or later"))
    if capability is not None and lowest <= capability <= highest:
        return []
    found = (
        "there is no CUDA device" if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
    )
    return [f"precision={precision} needs a GPU of compute capability {words}, and {found}"]
