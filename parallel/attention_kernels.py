"""Causal attention of whole windows by one of three kernels, and the choice among them.

cuDNN's kernel (the fastest on Hopper), FlashAttention-2 as it ships with torch, and torch's own dispatch,
which also covers CPUs and wide dtypes. A kernel is called by its operator and not through
`torch.nn.attention.sdpa_kernel`: that switches flags of the whole process around each call, and takes the
next kernel in silence where one cannot run. Here a pure function of facts says in words what a kernel lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.accelerators import Choice
from isozyme.core.context import CUDNN_TILE, AttentionKernel, KernelName
from isozyme.core.errors import BackendError

MIN_CUDNN = 90500
"""cuDNN 9.5: before it, a gradient that was not laid out as the output was read wrongly."""
PREFERRED_CUDNN = 91501
"""cuDNN 9.15.1: from here on torch itself prefers it. (What that release put right are lengths that are no
multiple of 128, which are not given to it here.)"""
_PREFERRED: Mapping[KernelName, str] = MappingProxyType(
    {
        "cudnn": f"preferred; flash for packed windows, and for no multiples of {CUDNN_TILE} tokens",
        "flash": "preferred",
    }
)
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """What decides which kernel can run; of one rank."""

    device: str
    """Type of the device, such as `cuda`."""
    dtype: torch.dtype
    head_width: int
    grouped: bool
    """Whether there are fewer key/value heads than query heads."""
    capability: tuple[int, int] | None
    """Compute capability; None without a CUDA device."""
    cudnn: int | None
    """Version of the cuDNN that torch loaded, such as 91900; None if there is none."""
    cudnn_enabled: bool
    """False after `torch.backends.cuda.enable_cudnn_sdp(False)`."""
    flash_enabled: bool
    """False after `torch.backends.cuda.enable_flash_sdp(False)`."""
    deterministic: bool
    """Whether deterministic algorithms were asked for."""

    @staticmethod
    def here(
        device: torch.device, dtype: torch.dtype, *, head_width: int, num_heads: int, num_kv_heads: int
    ) -> AttentionFacts:
        """The facts of this process. Reads no value from the device."""
        on_cuda = device.type == "cuda" and torch.cuda.is_available() and torch.version.cuda is not None
        return AttentionFacts(
            device=device.type,
            dtype=dtype,
            head_width=head_width,
            grouped=num_kv_heads != num_heads,
            capability=torch.cuda.get_device_capability(device) if on_cuda else None,
            cudnn=_cudnn_version() if on_cuda else None,
            cudnn_enabled=torch.backends.cuda.cudnn_sdp_enabled(),
            flash_enabled=torch.backends.cuda.flash_sdp_enabled(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )


def _cudnn_version() -> int | None:
    """That of torch; None if torch refuses the one that the process has loaded."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:
        return None


def kernel_problems(kernel: KernelName, facts: AttentionFacts) -> list[str]:
    """Every condition of a kernel that is unmet, in words; empty if it runs.

    The conditions are those by which torch 2.11 to 2.13 choose a kernel for windows of at least two tokens,
    without a mask and without dropout, and the least version of cuDNN.
    """
    if kernel == "torch":
        return []
    found = []
    if facts.device != "cuda" or facts.capability is None:
        found.append(f"it runs on NVIDIA GPUs: device={facts.device}")
    elif facts.capability < (8, 0):
        found.append(
            "it needs compute capability 8.0 or higher: this GPU has {}.{}".format(*facts.capability)
        )
    if facts.dtype not in HALF:
        found.append(f"it computes in bfloat16 and float16: dtype={_name(facts.dtype)}")
    widest = 128 if kernel == "cudnn" else 256
    if facts.head_width % 8 or facts.head_width > widest:
        found.append(
            f"the width of a head must be a multiple of 8, at most {widest}: head width={facts.head_width}"
        )
    if not (facts.cudnn_enabled if kernel == "cudnn" else facts.flash_enabled):
        found.append(f"torch.backends.cuda.enable_{kernel}_sdp(False) was called")
    return found + (_cudnn_problems(facts) if kernel == "cudnn" else [])


def _cudnn_problems(facts: AttentionFacts) -> list[str]:
    found = []
    if facts.capability is not None and (facts.cudnn is None or facts.cudnn < MIN_CUDNN):
        have = "none that it accepts" if facts.cudnn is None else str(facts.cudnn)
        found.append(f"it needs cuDNN {MIN_CUDNN} or later: torch has loaded {have}")
    if facts.deterministic:
        found.append("its backward is not deterministic, and deterministic algorithms were asked for")
    return found


def _auto_problems(facts: AttentionFacts) -> list[str]:
    """Why `auto` leaves cuDNN's kernel alone where it could run."""
    if facts.capability is None:
        return []
    if facts.capability[0] not in (9, 10):
        return ["it is faster than FlashAttention on compute capability 9.0 and 10.x only"]
    if facts.cudnn is not None and facts.cudnn < PREFERRED_CUDNN:
        return [
            f"it is taken from cuDNN {PREFERRED_CUDNN} on, and torch has loaded {facts.cudnn} (one in "
            "LD_LIBRARY_PATH hides that of torch)"
        ]
    if facts.capability[0] == 10 and facts.grouped:
        return ["with grouped key/value heads on compute capability 10.x wrong outputs have been reported"]
    return []


def choose_attention(wanted: AttentionKernel, facts: AttentionFacts) -> tuple[KernelName, Choice]:
    """The kernel that runs: the named one, or with `auto` the first usable of cudnn, flash and torch.

    Raises:
        BackendError: if the named kernel cannot run; the message lists every unmet condition.
    """
    if wanted != "auto":
        broken = kernel_problems(wanted, facts)
        if broken:
            raise BackendError(
                f"the attention kernel that was named cannot run: model.attention.kernel={wanted}; "
                f"{'; '.join(broken)}. Use model.attention.kernel=auto or torch."
            )
        return wanted, Choice(wanted, "named by model.attention.kernel")
    if facts.device != "cuda" or facts.dtype not in HALF:
        why = (
            f"the others are for bfloat16 and float16 on CUDA; this is {_name(facts.dtype)} on {facts.device}"
        )
        return "torch", Choice("torch", why)
    reasons: list[str] = []
    candidates: tuple[tuple[KernelName, list[str]], ...] = (
        ("cudnn", kernel_problems("cudnn", facts) or _auto_problems(facts)),
        ("flash", kernel_problems("flash", facts)),
    )
    for name, broken in candidates:
        if not broken:
            return name, Choice(name, "; ".join([_PREFERRED[name], *reasons]))
        reasons.append(f"not {name}: {', '.join(broken)}")
    return "torch", Choice("torch", "; ".join(reasons))


def fitting(kernel: KernelName, length: int) -> KernelName:
    """`kernel`; FlashAttention instead of cuDNN if `length`, of a window or a tile, is no multiple of 128."""
    return "flash" if kernel == "cudnn" and length % CUDNN_TILE else kernel


def attend(
    q: Float[Tensor, "B S N D"],
    k: Float[Tensor, "B S M D"],
    v: Float[Tensor, "B S M D"],
    kernel: KernelName = "torch",
) -> Float[Tensor, "B S N D"]:
    """Causal softmax attention with scale 1/sqrt(D); query head n reads key/value head n // (N / M).

    Padding stands at the end of a window, so that causality alone keeps it from real tokens.

    Args:
        q: queries of N heads.
        k: keys of M heads, M divides N (Ainslie et al. 2023, arXiv:2305.13245).
        v: values of M heads.
        kernel: one that `kernel_problems` finds nothing against.
    """
    q, k, v = (rearrange(x, "b s n d -> b n s d") for x in (q, k, v))
    if kernel == "cudnn":
        for_backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, for_backward, 0.0, True)[0]
    elif kernel == "flash":
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(out, "b n s d -> b s n d")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
