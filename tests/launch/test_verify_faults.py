"""Verification finds every fault made on purpose, and says what it looks like."""

from __future__ import annotations

import io
from functools import cache

import pytest
import torch
from rich.console import Console

from isozyme.core.config import RunConfig
from isozyme.core.topology import Layout
from isozyme.launch.compose import compose
from isozyme.launch.verify_faults import FAULTS, Fault
from isozyme.launch.verify_judge import Outcome, Reference, judge
from isozyme.launch.verify_plan import fault_layout, prepare
from isozyme.launch.verify_report import evidence, fault_table
from isozyme.launch.verify_run import Experiment, Setting

LAYOUT = Layout(dp=4, ep=2)


@cache
def _experiment() -> Experiment:
    return prepare(compose("L0_sanity"), [LAYOUT])


@cache
def _reference() -> Reference:
    return Reference.of(_experiment(), torch.float64)


@cache
def _outcome(name: str) -> Outcome:
    fault = next(each for each in FAULTS if each.name == name)
    setting = Setting(layout=LAYOUT, dtype=torch.float64, dispatcher=fault.dispatcher, experts="loop")
    return judge(_experiment(), setting, _reference(), fault=fault)


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


def test_faults_are_tried_where_experts_are_spread_and_replicated() -> None:
    assert fault_layout(RunConfig()) == Layout(dp=4, ep=2)


def test_the_table_of_faults_tells_found_from_missed() -> None:
    healthy = judge(
        _experiment(),
        Setting(layout=LAYOUT, dtype=torch.float64, dispatcher="alltoall", experts="loop"),
        _reference(),
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(fault_table([(FAULTS[0], _outcome(FAULTS[0].name)), (FAULTS[1], healthy)]))
    rows = [line for line in console.export_text().splitlines() if "expert gradients" in line]
    assert "found" in rows[0]
    assert "MISSED" in rows[1]
