"""Our router and capacity against the definition."""

from __future__ import annotations

import pytest

from isozyme.moe.capacity import DropPolicy
from isozyme.moe.testing import RouterPromises, check_capacity, check_router
from tests.properties.adapters import capacity_cut, router


def test_no_logits_refute_the_router() -> None:
    report = check_router(router, promises=RouterPromises(groups=True), examples=150, seconds=10.0)
    assert report.worlds >= 24


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_no_window_refutes_the_capacity(policy: DropPolicy) -> None:
    assert check_capacity(capacity_cut(policy), policy=policy, examples=150, seconds=5.0).worlds >= 24
