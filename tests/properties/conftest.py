"""Worlds run by the hundred here; annotations are checked by the tests of the parts that they exercise."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _many_worlds(unchecked_annotations: None) -> None:
    """A checked call costs several times an unchecked one."""
