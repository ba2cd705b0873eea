"""The commands of docs/parallelism.md work, and print what it says."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from isozyme.launch.cli import main, parse_layout
from isozyme.launch.compose import compose
from isozyme.launch.verify_plan import prepare
from tests.repo.source_tree import ROOT

TEXT = (ROOT / "docs" / "parallelism.md").read_text()
TABLES = re.findall(r"^```console\n\$ (isozyme topology [^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^isozyme [^\n]+$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), TABLES, ids=[command for command, _ in TABLES])
def test_the_table_of_ranks_is_what_is_printed(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == shown


def test_every_axis_has_its_table_and_its_command() -> None:
    for axis in ("tp", "cp", "dp", "pp", "ep", "etp"):
        assert any(f"{axis}=" in command for command, _ in TABLES)
        assert any(f"layout.{axis}=" in command for command in COMMANDS)


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("isozyme train")])
def test_what_shall_be_trained_can_be(command: str) -> None:
    _, _, recipe, *overrides = shlex.split(command)
    compose(recipe, overrides).validate()


def test_what_shall_be_verified_can_be() -> None:
    (command,) = [each for each in COMMANDS if "--layouts" in each]
    words = shlex.split(command)
    layouts = [parse_layout(word) for word in words if "=" in word]
    assert len(layouts) == 2
    found: Any = prepare(compose(words[2]), layouts)
    assert found.config.model.num_layers >= 2
