"""Kernels of the optimiser run as those of the experts do."""

from tests.moe.kernels.conftest import collect_ignore_glob, device

__all__ = ["collect_ignore_glob", "device"]
