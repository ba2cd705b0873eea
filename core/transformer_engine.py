"""The one place where Transformer Engine is imported: late, guarded, and with the reason kept if it fails.

Without a usable CUDA set-up its import fails in several ways (absent package, missing cuDNN or driver
libraries, extension of another version), so an `except ImportError` would not be enough.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from isozyme.core.config import Precision
from isozyme.core.errors import BackendError

FUSED_GROUPED_MLP_SWITCH = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
"""Environment variable that Transformer Engine reads when it is imported."""


def why_not() -> str | None:
    """Why Transformer Engine cannot be used in this process, or None if it can.

    It is imported only where the package and a CUDA device exist.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    if not torch.cuda.is_available():
        return "transformer_engine needs a CUDA device: torch.cuda.is_available() is False"
    return _attempt()[1]


def load() -> ModuleType:
    """The module `transformer_engine.pytorch`.

    Raises:
        BackendError: if Transformer Engine cannot be used here.
    """
    reason = why_not()
    if reason is not None:
        raise BackendError(f"Transformer Engine cannot be used: {reason}. Choose another backend, or `auto`.")
    module = _attempt()[0]
    assert module is not None
    return module


@functools.cache
def kernels() -> Any:
    """The compiled module `transformer_engine_torch`, whose functions know nothing of autograd.

    Raises:
        BackendError: if Transformer Engine cannot be used here.
    """
    load()
    import transformer_engine_torch

    return transformer_engine_torch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim by Transformer Engine's kernels.

    Args:
        x: bfloat16, float16 or float32 on CUDA.
        weight: as wide as the last dim of `x`, of the same dtype.
        eps: added to the mean square.

    Raises:
        BackendError: if Transformer Engine cannot be used here.
    """
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(Function):
    """Mean square and gradients are summed in fp32; rounded once, at the end."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        compiled = kernels()
        dtypes = {
            torch.float32: compiled.DType.kFloat32,
            torch.float16: compiled.DType.kFloat16,
            torch.bfloat16: compiled.DType.kBFloat16,
        }
        rows = x.contiguous().view(-1, x.shape[-1])
        # Neither a given output nor a quantiser; no SM left to others; a gain of `weight`, not of 1 + weight.
        out, _, scale = compiled.rmsnorm_fwd(rows, weight, eps, None, None, dtypes[x.dtype], 0, False)
        ctx.save_for_backward(rows, weight, scale)
        result: Tensor = out.view(x.shape)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scale = ctx.saved_tensors
        of_rows, of_weight, *_ = kernels().rmsnorm_bwd(
            grad.contiguous().view(rows.shape), rows, scale, weight, 0, False
        )
        return of_rows.view(grad.shape), of_weight.view(weight.shape), None


def fused_switch_is_set() -> bool:
    """Whether Transformer Engine was, or will be, imported with its fused grouped MLP switched on."""
    if "transformer_engine.pytorch" not in sys.modules:
        return os.environ.get(FUSED_GROUPED_MLP_SWITCH, "1") == "1"
    return os.environ.get(FUSED_GROUPED_MLP_SWITCH) == "1"


@functools.cache
def _attempt() -> tuple[ModuleType | None, str | None]:
    """The module, or the reason why its import failed; tried once, as a failed import leaves parts behind.

    The switch of the fused grouped MLP is read during the import, so it is set here, unless the user has set
    it. It only lets Transformer Engine recognise the pattern; nothing else changes.
    """
    if "transformer_engine.pytorch" not in sys.modules:
        os.environ.setdefault(FUSED_GROUPED_MLP_SWITCH, "1")
    try:
        with _with_cudnn_of_torch():
            import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return None, f"import transformer_engine.pytorch failed: {type(error).__name__}: {error}"
    return transformer_engine.pytorch, None


@contextmanager
def _with_cudnn_of_torch() -> Iterator[None]:
    """Have Transformer Engine load the cuDNN that torch has, unless the user has named one.

    Left alone it takes one of the system before that of torch's package. Two of different versions in one
    process do not work: whichever comes second fails to load, or torch refuses to use it. cuDNN is several
    libraries, some of which torch loads late, and what is not loaded yet would be the system's: so all of
    torch's are loaded before.
    """
    folder = cudnn_of_torch()
    if folder is None or any(name in os.environ for name in _CUDNN_PLACES):
        yield
        return
    for library in sorted(Path(folder).glob("libcudnn*.so.*")):
        with suppress(OSError):  # one that cannot be loaded is missed, or not, by the import itself
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ[_CUDNN_PLACES[0]] = folder
    try:
        yield
    finally:
        os.environ.pop(_CUDNN_PLACES[0], None)


_CUDNN_PLACES = ("CUDNN_HOME", "CUDNN_PATH")
"""Variables in which Transformer Engine looks for cuDNN first."""


def cudnn_of_torch(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The folder of the cuDNN that torch has loaded, else that of the package beside torch; None if neither.

    Args:
        maps: the libraries of this process, as Linux lists them.
    """
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = Path(line.partition("/")[1] + line.partition("/")[2])
            if path.name.startswith("libcudnn.so"):
                return str(path.parent)
    package = Path(torch.__file__).parents[1] / "nvidia" / "cudnn" / "lib"
    return str(package) if package.is_dir() else None


def recipe_for(precision: Precision) -> Any:
    """Transformer Engine's recipe object for a quantised precision.

    Delayed scaling keeps its amax to itself: reducing it over all ranks, as is the default, would make a rank
    that skips a layer hang the others.

    Raises:
        BackendError: if Transformer Engine cannot be used here.
        ValueError: if the precision is not one of Transformer Engine's.
    """
    load()
    from transformer_engine.common import recipe

    makers: dict[str, Callable[[], Any]] = {
        "fp8_current": recipe.Float8CurrentScaling,
        "fp8_delayed": lambda: recipe.DelayedScaling(reduce_amax=False),
        "fp8_block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }
    if precision not in makers:
        raise ValueError(f"precision={precision} has no Transformer Engine recipe: {', '.join(makers)} have.")
    return makers[precision]()
