"""What the sources must not contain: unfinished work, global statements, files too long for one sitting."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.repo.source_tree import ROOT, module_name, package_files

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
MOST_LINES = 400


def python_files() -> list[Path]:
    tests = [file for file in sorted((ROOT / "tests").rglob("*.py")) if file != Path(__file__).resolve()]
    return [*package_files(), *tests, ROOT / "setup.py"]


def test_nothing_is_marked_as_unfinished() -> None:
    marked = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in python_files()
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not marked


def test_no_function_rebinds_a_module_global() -> None:
    rebinding = [
        f"{module_name(file)}:{node.lineno}"
        for file in package_files()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert not rebinding


def test_every_module_can_be_read_in_one_sitting() -> None:
    lengths = {module_name(file): len(file.read_text().splitlines()) for file in package_files()}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}
