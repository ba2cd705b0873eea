"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), computed in at least fp32."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.models.builder import Builder


def rms_norm(
    x: Float[Tensor, "*batch H"], weight: Float[Tensor, "H"], eps: float
) -> Float[Tensor, "*batch H"]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim, in the dtype of `x`.

    torch's fused operator keeps a half-precision input's square mean, and its product with `weight`, in fp32
    and rounds once at the end.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class RMSNorm(nn.Module):
    """Normalises the last dim to unit root mean square and multiplies it with a learned gain.

    Args:
        builder: makes the parameter.
        name: global name of the module; the gain is `<name>.weight`.
        width: size of the last dim.
        eps: added to the mean square.
    """

    def __init__(self, builder: Builder, name: str, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = builder.norm_weight(f"{name}.weight", width)
        self.eps = eps

    def forward(self, x: Float[Tensor, "*batch H"]) -> Float[Tensor, "*batch H"]:
        """Normalise the last dim."""
        return rms_norm(x, self.weight, self.eps)
