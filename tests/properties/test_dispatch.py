"""Our dispatchers and permutation against every claim of the toolkit, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from isozyme.moe.dispatch_allgather import AllGatherDispatcher
from isozyme.moe.dispatch_alltoall import AllToAllDispatcher
from isozyme.moe.dispatch_local import LocalDispatcher
from isozyme.moe.testing import ISOZYME, Place, Promises, World, check_dispatcher, check_permutation, worlds
from isozyme.moe.testing.inputs import inputs_of
from isozyme.moe.testing.observe import Step, Subject, observe
from tests.properties.adapters import InHalves, padded, permute_by_ids, unpermute_by_slots

DISPATCHERS: dict[str, tuple[Callable[[Place], Any], Promises]] = {
    "local": (lambda place: LocalDispatcher(), replace(ISOZYME, ranks=1)),
    "allgather": (lambda place: AllGatherDispatcher(place.placement), ISOZYME),
    "alltoall": (lambda place: AllToAllDispatcher(place.placement), ISOZYME),
    "alltoall in halves": (InHalves, ISOZYME),
    "padded": (padded, replace(ISOZYME, filler=True)),
}


@pytest.mark.parametrize("name", DISPATCHERS)
def test_no_world_refutes_a_dispatcher(name: str) -> None:
    factory, promises = DISPATCHERS[name]
    report = check_dispatcher(factory, promises=promises, examples=40, seconds=12.0)
    assert report.worlds >= 24


@pytest.mark.parametrize("name", ["allgather", "alltoall", "padded"])
def test_six_ranks_are_as_good_as_four(name: str) -> None:
    factory, promises = DISPATCHERS[name]
    check_dispatcher(factory, promises=replace(promises, ranks=6, tokens=3), examples=12, seconds=6.0, seed=9)


def test_no_world_refutes_the_permutation() -> None:
    report = check_permutation(permute_by_ids, unpermute_by_slots, examples=100, seconds=8.0)
    assert report.worlds >= 24


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@settings(max_examples=20)
@given(worlds(ISOZYME))
def test_all_gather_and_all_to_all_deliver_the_same_rows_in_the_same_order(world: World) -> None:
    inputs = inputs_of(world)
    (gathered,), (exchanged,) = (
        observe(Subject(factory=DISPATCHERS[name][0]), world, Step(inputs=inputs))
        for name in ("allgather", "alltoall")
    )
    for one, other in zip(gathered.seen, exchanged.seen, strict=True):
        assert one.counts == other.counts
        assert one.rows.equal(other.rows)
        assert one.probs is not None
        assert other.probs is not None
        assert torch.equal(one.probs, other.probs)
