"""Worlds run by the hundred here; annotations are checked by the tests of the parts that they exercise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from isozyme.moe.testing import search


@pytest.fixture(autouse=True)
def _many_worlds(unchecked_annotations: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checked call costs several times an unchecked one; a busy machine must find what a quiet one does."""
    monkeypatch.setattr(search, "LEAST_WORLDS", 60)


@pytest.fixture
def endless_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a search stands still, so what it finds does not depend on how busy the machine is."""
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: 0.0))
