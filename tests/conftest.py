"""What all tests share: hypothesis profiles, the `gpu` marker, a fixed state, unchecked annotations.

Annotations of the package are checked by the import hook that pyproject.toml names, not from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton reads this when it is imported, which some test or library may do before the first kernel's test.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# `ci` is the same on every machine and in every run; `HYPOTHESIS_PROFILE=dev make test` looks for new ones.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=20,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, max_examples=200, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip a test marked `gpu` where there are fewer CUDA devices than it needs."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {found}"))


THREADS = torch.get_num_threads()
"""Those of the start (OMP_NUM_THREADS). What is under test may ask for more, as a rank of its own would."""


@pytest.fixture(autouse=True)
def _fixed_state() -> None:
    """Each test starts from the same random state and as many threads, whichever tests ran before it."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Switch the annotation checks off, so that a wrong argument reaches the error of the function itself."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
