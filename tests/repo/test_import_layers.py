"""Imports go launch → models → moe → parallel → core; the contracts are in pyproject.toml."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source_tree import ROOT, TREES, module_name, package_files

OPTIONAL = {
    "hypothesis": "isozyme.moe.testing",
    "transformer_engine": "isozyme.core.transformer_engine",
    "transformer_engine_torch": "isozyme.core.transformer_engine",
}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the source tree at `root`, not on the installed package."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    for tree in (*TREES, "src"):
        shutil.copytree(ROOT / tree, tmp_path / tree, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("core/errors.py", "import isozyme.launch", "import only to the right"),
        ("parallel/shard_spec.py", "from isozyme import moe", "import only to the right"),
        ("core/errors.py", "import hypothesis", "only isozyme.moe.testing imports hypothesis"),
        (
            "launch/__init__.py",
            "from isozyme.moe import testing",
            "nothing in isozyme imports isozyme.moe.testing",
        ),
        ("moe/__init__.py", "import transformer_engine.pytorch", "imports Transformer Engine"),
    ],
)
def test_a_forbidden_import_is_found(copied_tree: Path, file: str, line: str, broken: str) -> None:
    with (copied_tree / file).open("a") as source:
        source.write(f"\n{line}\n")
    result = lint_imports(copied_tree)
    verdicts = [verdict for verdict in result.stdout.splitlines() if "BROKEN" in verdict]
    assert result.returncode == 1, result.stdout + result.stderr
    assert len(verdicts) == 1, result.stdout
    assert broken in verdicts[0]


def test_no_import_by_string_goes_round_the_contracts() -> None:
    """import-linter reads import statements; `import_module("hypothesis")` is found here."""
    offenders = []
    for file in package_files():
        name = module_name(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
                continue
            if ast.unparse(node.func).rpartition(".")[2] not in ("import_module", "__import__"):
                continue
            target = str(node.args[0].value).partition(".")[0]
            if not name.startswith(OPTIONAL.get(target, "")):
                offenders.append(f"{name}:{node.lineno} imports {target}")
    assert not offenders
