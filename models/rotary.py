"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) from the positions that a batch carries.

Channel i is paired with channel i + D/2 ("rotate half", as in Hugging Face models), not with its neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from isozyme.models.kernels.rotary import rotate_pairs


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Cosine and sine of each token's angles, at least fp32; the same for every head and layer."""

    cos: Float[Tensor, "B S D2"]
    sin: Float[Tensor, "B S D2"]


def rotation_at(positions: Int[Tensor, "B S"], head_width: int, theta: float, dtype: torch.dtype) -> Rotation:
    """The rotation of every token: angle `position * theta^(-2i/D)` for channel pair i.

    Angles are computed in fp64 whatever the model's dtype: in fp32 the fastest pair is off by 0.06 rad at
    position 10^6, which is an ordinary position in a genome. The result has at least fp32.

    Args:
        positions: index of each token within its document.
        head_width: D, even.
        theta: the base of the geometric series of wavelengths.
        dtype: the model's dtype.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device=positions.device) / head_width
    angles = positions.to(torch.float64)[..., None] * theta**-exponents
    wide = torch.promote_types(dtype, torch.float32)
    return Rotation(cos=angles.cos().to(wide), sin=angles.sin().to(wide))


def rotate(x: Float[Tensor, "B S N D"], rotation: Rotation) -> Float[Tensor, "B S N D"]:
    """Turn each channel pair of each head by its token's angle, computed in at least fp32."""
    turned: Tensor = rotate_pairs(x, rotation.cos, rotation.sin, False)
    return turned
