"""Verification finds every fault made on purpose, and says what it looks like."""

from __future__ import annotations

import io
from functools import cache

import pytest
from rich.console import Console

from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout, Topology
from isozyme.launch import verify_run
from isozyme.launch.compose import compose
from isozyme.launch.verify_faults import FAULTS
from isozyme.launch.verify_judge import Outcome
from isozyme.launch.verify_report import evidence, fault_table
from isozyme.launch.verify_tamper import Fault
from isozyme.launch.verify_trials import Grounds, Trial, fault_layout

pytestmark = pytest.mark.usefixtures("unchecked_annotations")  # whole training steps; checked elsewhere


@pytest.fixture(autouse=True)
def _two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first two steps show, all of them show."""
    monkeypatch.setattr(verify_run, "STEPS", 2)


@cache
def _grounds() -> Grounds:
    return Grounds(compose("L0_sanity"))


@cache
def _trial(name: str) -> Trial:
    return _grounds().trial(next(each for each in FAULTS if each.name == name))


def _outcome(name: str) -> Outcome:
    outcome = _trial(name).outcome
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_found(fault: Fault) -> None:
    outcome = _outcome(fault.name)
    assert not outcome.passed
    assert evidence(outcome)


def test_ranks_that_would_sum_different_experts_are_refused_by_the_gradient_buffer() -> None:
    outcome = _outcome("experts reduced as dense")
    assert outcome.error is not None
    assert outcome.error.startswith("CommunicationError")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("expert gradients too large", "ep or edp (2) times too large"),
        ("expert gradients averaged", "ep or edp (2) times too small"),
        ("expert gradients averaged", "only expert tensors differ"),
        ("dense gradients not reduced", "only dense tensors differ"),
        ("drifting replica", "replicas differ from each other: embedding.weight on rank 3"),
        ("drifting replica", "everything agrees before step"),
        ("norm without a rank", "all gradients agree, the norm does not"),
        ("balance loss by rank", "balance loss, step 0"),
    ],
)
def test_the_message_points_to_the_fault(name: str, hint: str) -> None:
    assert hint in _outcome(name).explain()


def test_the_message_names_the_layout_the_rank_and_its_coordinates() -> None:
    text = _outcome("expert gradients too large").explain()
    assert text.startswith("dp=4 ep=2, float64, dispatcher alltoall, experts loop")
    assert "rank 1 (dp=1 ep=1 edp=0)" in text
    assert "past the tolerance on ranks 1, 3" in text


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "ep", "etp"])
def test_several_faults_belong_to_each_axis(axis: str) -> None:
    default = fault_layout(compose("L0_sanity"))
    layouts = [fault.layout or default for fault in FAULTS]
    assert sum(Topology(layout).size(axis) > 1 for layout in layouts) >= (1 if axis == "etp" else 3)


def test_a_fault_that_the_recipe_has_no_room_for_is_said_and_not_missed() -> None:
    odd = compose("L0_sanity", ["model.num_heads=3", "model.num_kv_heads=3"])
    found = Grounds(odd).trial(next(fault for fault in FAULTS if fault.name == "router not summed over TP"))
    assert found.outcome is None
    assert not found.missed
    assert "3 % 2 = 1" in found.refused


def test_faults_are_tried_where_experts_are_spread_and_replicated() -> None:
    assert fault_layout(RunConfig()) == Layout(dp=4, ep=2)


def test_the_table_of_faults_tells_found_from_missed() -> None:
    wrong, right = FAULTS[0], Fault(name="no fault", says="nothing goes wrong", layout=Layout(dp=2))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(fault_table([_trial(wrong.name), _grounds().trial(right)]))
    rows = console.export_text().splitlines()
    assert any(wrong.name in row and "found" in row for row in rows)
    assert any(right.name in row and "MISSED" in row for row in rows)
