"""The package is imported under one name, needs no optional dependency, and leaves the process as it was."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.repo.source_tree import TREES, importable_modules, module_name, package_files

SIDE_EFFECTS = """
import importlib, json, os, random, sys, threading
import numpy, torch, jaxtyping, einops, omegaconf, rich.table, safetensors

def state():
    return {
        "environment": dict(os.environ),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "torch random state": torch.get_rng_state().sum().item(),
        "numpy random state": numpy.random.get_state()[1].sum().item(),
        "random state": hash(random.getstate()),
        "gradients enabled": torch.is_grad_enabled(),
        "autograd threads": torch.autograd.is_multithreading_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "python threads": threading.active_count(),
        "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "cuda context": torch.cuda.is_initialized(),
        "working directory": os.getcwd(),
        "search path": list(sys.path),
    }

before = state()
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""

WITHOUT_OPTIONAL = """
import importlib, json, sys

class Absent:
    names = {
        "beartype", "hypothesis", "pytest", "transformers", "triton",
        "transformer_engine", "transformer_engine_torch",
    }

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import torch
sys.meta_path.insert(0, Absent())
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
"""

ELSEWHERE = """
import importlib.util, json, sys
found = {name: importlib.util.find_spec(name) for name in json.loads(sys.argv[1])}
assert not any(found.values()), f"importable beside isozyme.*: {found}"
import isozyme.core
"""


def without_kernels(names: list[str]) -> list[str]:
    """Modules that hold Triton kernels are imported when one is launched, and by nothing else."""
    return [name for name in names if not name.rpartition(".")[2].startswith("triton_")]


def run(code: str, names: list[str], folder: Path) -> str:
    command = [sys.executable, "-c", code, json.dumps(names)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_each_folder_is_importable_under_one_name_only(tmp_path: Path) -> None:
    run(ELSEWHERE, list(TREES), tmp_path)


def test_importing_everything_changes_nothing_else_in_the_process(tmp_path: Path) -> None:
    output = run(SIDE_EFFECTS, without_kernels(importable_modules()), tmp_path)
    assert json.loads(output.splitlines()[-1]) == {}


def test_the_package_imports_without_optional_dependencies(tmp_path: Path) -> None:
    names = [name for name in importable_modules() if not name.startswith("isozyme.moe.testing")]
    run(WITHOUT_OPTIONAL, without_kernels(names), tmp_path)


def test_every_folder_with_sources_is_a_package() -> None:
    """A folder without __init__.py would be left out of the wheel."""
    packages = {file.parent for file in package_files()}
    without = {
        file.parent
        for package in packages
        for file in package.rglob("*.py")
        if not (file.parent / "__init__.py").exists() and file.parent.name not in ("scripts", "recipes")
    }
    assert not without


def test_every_module_says_what_it_is_about() -> None:
    silent = [
        module_name(file) for file in package_files() if not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert not silent
