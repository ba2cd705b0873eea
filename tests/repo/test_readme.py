"""What the documents promise is true: the README's Python runs, its make targets and relative links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source_tree import ROOT

README = ROOT / "README.md"
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)(?:#[^)]*)?\)")
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})


def code_blocks(document: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(document.read_text()) if language in languages]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_python_blocks_run_in_order(tmp_path: Path) -> None:
    """As a reader would type them: one interpreter, another folder, top to bottom."""
    blocks = code_blocks(README, "python", "py")
    assert blocks, "README.md shows no Python"
    program = tmp_path / "readme.py"
    program.write_text("\n\n".join(blocks))
    command = [sys.executable, str(program)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_make_commands_exist() -> None:
    commands = "\n".join(code_blocks(README, "bash", "sh", "console", "shell", ""))
    named = set(re.findall(r"\bmake ([a-z-]+)", commands))
    assert {"train", "test"} <= named
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document: Path) -> None:
    targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
    dead = [target for target in targets if not (document.parent / target).exists()]
    assert not dead
