"""Our layer at any layout, with any batch and any schedule: that of one rank, which is the dense loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from isozyme.moe.testing import LayerPromises, check_moe_layer
from tests.properties.adapters import Layer, dense_layer

KINDS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "all-gather": {"dispatcher": "allgather"},
    "shared expert": {"shared_ffn": 4},
    "capacity": {"capacity_factor": 0.75},
    "capacity by position": {"capacity_factor": 0.5, "drop_policy": "position"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_world_refutes_the_layer(kind: str) -> None:
    report = check_moe_layer(
        partial(Layer, **KINDS[kind]),
        promises=LayerPromises(split_windows=True),
        reference=dense_layer if kind in ("dropless", "all-gather") else None,  # type: ignore[arg-type]
        examples=25,
        seconds=6.0,
    )
    assert report.worlds >= 12


def test_buffers_of_fixed_size_serve_ranks_with_equally_many_windows() -> None:
    factory = partial(Layer, capacity_factor=0.75, pad_to_capacity=True)
    check_moe_layer(factory, promises=LayerPromises(uneven=False), examples=20, seconds=6.0)
