"""Kernels run on the GPU where there is one, and under Triton's interpreter elsewhere.

The interpreter is chosen by an environment variable that Triton reads when a kernel is defined, so it is set
before the first kernel module is imported.
"""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
