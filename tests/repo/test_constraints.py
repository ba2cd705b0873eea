"""constraints.txt pins one tested version of each dependency, in the range that pyproject.toml promises."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.repo.source_tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
RUNTIME = [Requirement(line) for line in PROJECT["dependencies"]]
TOOLS = [Requirement(line) for line in EXTRAS["dev"] + EXTRAS["testing"]]


UNPINNED = {"triton"}
"""A CUDA build of torch brings the version that it needs."""


def pins() -> dict[str, Version]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize("requirement", [r for r in RUNTIME + TOOLS if r.name not in UNPINNED], ids=str)
def test_tested_version_is_in_the_promised_range(requirement: Requirement) -> None:
    version = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version)


@pytest.mark.parametrize("requirement", RUNTIME, ids=str)
def test_runtime_dependencies_promise_a_lower_bound_and_no_upper_one(requirement: Requirement) -> None:
    assert [clause.operator for clause in requirement.specifier] == [">="]


def test_everything_pinned_is_asked_for() -> None:
    assert set(pins()) == {canonicalize_name(requirement.name) for requirement in RUNTIME + TOOLS} - UNPINNED


def test_apex_is_never_asked_for() -> None:
    assert "apex" not in {Requirement(line).name for lines in EXTRAS.values() for line in lines}
