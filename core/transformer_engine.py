"""The one place where Transformer Engine is imported: late, guarded, and with the reason kept if it fails.

Without a usable CUDA set-up its import fails in several ways (absent package, missing cuDNN or driver
libraries, extension of another version), so an `except ImportError` would not be enough.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import ModuleType

import torch

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


def load(*, fused_grouped_mlp: bool = False) -> ModuleType:
    """The module `transformer_engine.pytorch`.

    Args:
        fused_grouped_mlp: ask for the fused grouped MLP kernel. Its switch is read when Transformer Engine is
            imported, so this must be the first import in the process, or the switch must be set already.

    Raises:
        BackendError: if Transformer Engine cannot be used here, or was imported without the switch.
    """
    if fused_grouped_mlp and os.environ.get(FUSED_GROUPED_MLP_SWITCH) != "1":
        if "transformer_engine.pytorch" in sys.modules:
            raise BackendError(
                f"the fused grouped MLP needs {FUSED_GROUPED_MLP_SWITCH}=1 before Transformer Engine is "
                f"imported, and it has been imported without. Set {FUSED_GROUPED_MLP_SWITCH}=1 in the "
                "environment."
            )
        os.environ[FUSED_GROUPED_MLP_SWITCH] = "1"
    reason = why_not()
    if reason is not None:
        raise BackendError(f"Transformer Engine cannot be used: {reason}. Choose another backend, or `auto`.")
    module = _attempt()[0]
    assert module is not None
    return module


@functools.cache
def _attempt() -> tuple[ModuleType | None, str | None]:
    """The module, or the reason why its import failed; tried once, as a failed import leaves parts behind."""
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return None, f"import transformer_engine.pytorch failed: {type(error).__name__}: {error}"
    return transformer_engine.pytorch, None
