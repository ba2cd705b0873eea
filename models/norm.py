"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), computed in at least fp32.

Transformer Engine's, apex's or torch's kernels; the gain stays a parameter of this package with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from isozyme.core.accelerators import Choice, Probe, apex_rms_norm, te_rms_norm
from isozyme.core.config import NormImplementation
from isozyme.core.errors import BackendError
from isozyme.models.builder import Builder

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""(x, weight, eps) → y."""
Probes = Mapping[str, Callable[[], Probe]]

PROBES: Probes = MappingProxyType({"te": te_rms_norm, "apex": apex_rms_norm})
"""How to look for the implementations that are optional, in the order of preference."""
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What the optional implementations compute in, on CUDA."""


def rms_norm(
    x: Float[Tensor, "*batch H"], weight: Float[Tensor, "H"], eps: float
) -> Float[Tensor, "*batch H"]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim, in the dtype of `x`.

    torch's fused operator keeps a half-precision input's square mean, and its product with `weight`, in fp32
    and rounds once at the end.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def choose_norm(
    wanted: NormImplementation, device: torch.device, dtype: torch.dtype, probes: Probes = PROBES
) -> tuple[Norm, Choice]:
    """The norm that `wanted` names; for `auto` the first usable of te, apex and torch.

    The gradient of the gain is a sum over all tokens, for which torch's kernel takes several times as long as
    reading the activations: hence the order.

    Args:
        wanted: the setting `model.norm`.
        device: where the activations are.
        dtype: of activations and gain.
        probes: how to look for `te` and `apex`.

    Raises:
        BackendError: if the one that was named cannot be used; the message says why.
    """
    if wanted == "torch":
        return rms_norm, Choice("torch", "named by model.norm")
    misfit = _misfit(device, dtype)
    reasons = [] if misfit is None else [misfit]
    for name in probes if misfit is None else ():
        if wanted not in ("auto", name):
            continue
        probe = probes[name]()
        if probe.part is not None:
            why = "preferred" if wanted == "auto" else "named by model.norm"
            return _where_it_fits(probe.part), Choice(name, "; ".join([why, *reasons]))
        reasons.append(f"not {name}: {probe.why_not}")
    if wanted == "auto":
        return rms_norm, Choice("torch", "; ".join(reasons))
    raise BackendError(
        f"the norm that was named cannot run: model.norm={wanted}; {'; '.join(reasons)}. "
        "Use model.norm=auto or torch."
    )


def _misfit(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why neither te nor apex can compute on these tensors, wherever they are installed."""
    if device.type == "cuda" and dtype in FUSED_DTYPES:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"te and apex are for bfloat16, float16 and float32 on CUDA; this is {name} on {device.type}"


def _where_it_fits(kernel: Norm) -> Norm:
    """`kernel`, but torch's operator in a model that was cast to float64 after it was built, and while
    `torch.compile` traces, which can fuse its own operators alone."""

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        fits = x.dtype in FUSED_DTYPES and not torch.compiler.is_compiling()
        return kernel(x, weight, eps) if fits else rms_norm(x, weight, eps)

    return norm


class RMSNorm(nn.Module):
    """Normalises the last dim to unit root mean square and multiplies it with a learned gain.

    Args:
        builder: makes the parameter.
        name: global name of the module; the gain is `<name>.weight`.
        width: size of the last dim.
        eps: added to the mean square.
        implementation: whose kernels; see `choose_norm`.

    Attributes:
        choice: whose kernels it uses, and why.

    Raises:
        BackendError: if the implementation that was named cannot be used.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        width: int,
        *,
        eps: float,
        implementation: NormImplementation = "torch",
    ) -> None:
        super().__init__()
        self.weight = builder.norm_weight(f"{name}.weight", width)
        self.eps = eps
        self._norm, self.choice = choose_norm(implementation, builder.device, builder.dtype)

    def forward(self, x: Float[Tensor, "*batch H"]) -> Float[Tensor, "*batch H"]:
        """Normalise the last dim."""
        return self._norm(x, self.weight, self.eps)
