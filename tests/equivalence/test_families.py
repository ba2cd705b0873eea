"""Any layout does what one rank does: losses, every gradient, the norm, weights after three steps.

The list is that of `isozyme verify --all`. Each axis alone and each pair run always, and every kind of model
at one layout; its other layouts are marked slow.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from isozyme.core.topology import Layout, Topology
from isozyme.launch.verify_all import Subject, families_of, problem
from isozyme.launch.verify_families import ALONE, FAMILIES, PAIRS, Family
from isozyme.launch.verify_judge import Reference, judge
from isozyme.launch.verify_plan import prepare, settings
from isozyme.launch.verify_run import Experiment, Setting
from isozyme.models.decoder import build_model

SUBJECT = Subject(factory=build_model)
KINDS = [family for family in families_of(SUBJECT) if family not in (ALONE, PAIRS)]
UNCHECKED = pytest.mark.usefixtures("unchecked_annotations")
"""For whole training steps: annotations are checked where the parts are tested, and for each axis alone."""


@cache
def _experiment(family: Family, layout: Layout) -> Experiment:
    return prepare(SUBJECT.config(family), [layout])


@cache
def _reference(family: Family, layout: Layout, dtype: torch.dtype) -> Reference:
    return Reference.of(_experiment(family, layout), dtype)


def _hold(family: Family, setting: Setting) -> None:
    at, dtype = setting.layout, setting.dtype
    outcome = judge(_experiment(family, at), setting, _reference(family, at, dtype))
    assert outcome.passed, outcome.explain()


def _exact(family: Family, layout: Layout) -> Setting:
    return Setting(layout=layout, dtype=torch.float64, dispatcher=family.dispatcher, experts="loop")


def _representative(family: Family) -> Layout:
    """The widest layout of up to four ranks, the last of several; the smallest if all are wider."""

    def ranks(layout: Layout) -> int:
        return Topology(layout).world_size

    small = [layout for layout in family.layouts if ranks(layout) <= 4]
    return max(reversed(small), key=ranks) if small else min(family.layouts, key=ranks)


QUICK = [(family, _representative(family)) for family in KINDS if not family.name.startswith("draw")]
REST = [(f, at) for f in KINDS for at in f.layouts if (f, at) not in QUICK]


def _name(value: Family | Layout) -> str:
    return value.name if isinstance(value, Family) else str(value)


@pytest.mark.parametrize("layout", ALONE.layouts, ids=str)
def test_each_axis_alone_equals_one_rank_in_fp64(layout: Layout) -> None:
    _hold(ALONE, _exact(ALONE, layout))


@UNCHECKED
@pytest.mark.parametrize("layout", PAIRS.layouts, ids=str)
def test_each_pair_of_axes_equals_one_rank_in_fp64(layout: Layout) -> None:
    _hold(PAIRS, _exact(PAIRS, layout))


@UNCHECKED
@pytest.mark.parametrize(("family", "layout"), QUICK, ids=_name)
def test_every_kind_of_model_equals_one_rank_in_fp64(family: Family, layout: Layout) -> None:
    _hold(family, _exact(family, layout))


@pytest.mark.slow
@UNCHECKED
@pytest.mark.parametrize(("family", "layout"), REST, ids=_name)
def test_every_other_layout_of_the_list_equals_one_rank_in_fp64(family: Family, layout: Layout) -> None:
    _hold(family, _exact(family, layout))


@UNCHECKED
@pytest.mark.parametrize("layout", ALONE.fp32, ids=str)
def test_every_backend_of_the_cpu_equals_one_rank_in_fp32_with_its_routing(layout: Layout) -> None:
    config = _experiment(ALONE, layout).config
    chosen = settings(config, [layout], dtypes=[torch.float32], dispatchers=[ALONE.dispatcher])
    assert {"loop", "grouped_mm"} <= {setting.experts for setting in chosen}
    for setting in chosen:
        _hold(ALONE, setting)


@UNCHECKED
@pytest.mark.parametrize(
    ("family", "layout"), [each for each in QUICK if each[0].name.startswith("capacity")], ids=_name
)
def test_capacity_drops_slots_in_the_runs_that_are_compared(family: Family, layout: Layout) -> None:
    num_real = _experiment(family, layout).windows.num_real
    routings = _reference(family, layout, torch.float64).routings
    assert any(not routing.kept[: num_real(window)].all() for (window, _), routing in routings.items())


def test_each_axis_each_pair_and_all_together_are_in_the_list() -> None:
    axes = ("tp", "cp", "dp", "pp", "ep", "etp")
    fixed = [(family, layout) for family in FAMILIES for layout in family.layouts]
    assert len({str(layout) for _, layout in fixed}) >= 40
    assert not [(f.name, str(layout)) for f, layout in fixed if problem(SUBJECT, f, layout) is not None]
    assert max(Topology(layout).world_size for _, layout in fixed) == 16
    wide = [{axis for axis in axes if getattr(at.resolved(), axis) > 1} for _, at in fixed]
    for axis in axes:
        assert any(axis in found for found in wide)
        assert all(any({axis, other} <= found for found in wide) for other in axes)
    assert set(axes) in wide
