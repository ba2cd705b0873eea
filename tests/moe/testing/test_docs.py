"""The tutorial does what it says, and the reference and the table of faults are complete."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from isozyme.moe import testing
from isozyme.moe.testing import CLAIMS, Violation
from tests.repo.source_tree import ROOT

DOCS = ROOT / "docs" / "testing"
BLOCK = re.compile(r"(?:<!-- raised by (\w+) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)


def blocks(name: str) -> list[tuple[str, str, str]]:
    """(function that raises it, language, text) of each fenced block."""
    return BLOCK.findall((DOCS / name).read_text())


def test_the_tutorials_code_runs_and_prints_what_is_shown(endless_time: None) -> None:
    namespace: dict[str, Any] = {}
    shown = []
    for raised_by, language, text in blocks("tutorial.md"):
        if language == "python":
            exec(compile(text, "tutorial.md", "exec"), namespace)
        else:
            shown.append((raised_by, text))
    ((raised_by, text),) = shown
    with pytest.raises(Violation) as caught:
        namespace[raised_by]()
    assert str(caught.value).strip() == text.strip()
    with pytest.raises(Violation, match=re.escape(caught.value.finding)):
        namespace["test_the_world_that_failed"]()


def test_every_python_block_of_the_how_to_can_be_parsed() -> None:
    texts = [text for _, language, text in blocks("how-to-adapt.md") if language == "python"]
    assert len(texts) >= 4
    for text in texts:
        ast.parse(text)


def test_the_reference_names_everything_that_is_public_and_every_claim() -> None:
    text = (DOCS / "reference.md").read_text()
    missing = [name for name in (*testing.__all__, *CLAIMS) if f"`{name}" not in text]
    assert not missing
    for name in CLAIMS:
        assert f"| `{name}` | {CLAIMS[name]} |" in text


@pytest.mark.parametrize("promises", ["Promises", "RouterPromises", "LayerPromises"])
def test_the_reference_says_every_promise_and_its_default(promises: str) -> None:
    text = (DOCS / "reference.md").read_text()
    for name, parameter in inspect.signature(getattr(testing, promises)).parameters.items():
        default = str(parameter.default).replace("'", '"')
        assert f"| `{name}` | `{default}` |" in text, name


def fault_rows() -> list[list[str]]:
    lines = (DOCS / "faults.md").read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ ", line)
    ]


def test_there_are_thirty_faults_in_order() -> None:
    assert [int(row[0]) for row in fault_rows()] == list(range(1, 31))


def defined(test_id: str) -> bool:
    file, _, names = test_id.partition("::")
    path = Path(ROOT / file)
    if not path.is_file():
        return False
    body: list[Any] = ast.parse(path.read_text()).body
    for name in names.split("::"):
        found = [node for node in body if getattr(node, "name", None) == name]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("row", fault_rows(), ids=lambda row: row[0])
def test_the_tests_of_a_fault_exist_and_its_claims_too(row: list[str]) -> None:
    claims, ids = re.findall(r"`(\w+)`", row[2]), re.findall(r"`([^`]+)`", row[3])
    assert set(claims) <= set(CLAIMS)
    assert ids
    assert [test_id for test_id in ids if not defined(test_id)] == []
