"""The wheel, built by way of the sdist, holds all modules and data and works far from the sources."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.repo import wheel_smoke
from tests.repo.source_tree import ROOT, TREES, module_name, package_files

DATA = ("core/sample/*", "launch/recipes/*.yaml", "moe/experts/measured_on/*.json", "launch/scripts/*")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the working tree gets no build/ folder."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for tree in (*TREES, "src"):
        shutil.copytree(
            ROOT / tree, source / tree, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(source)]
    result = subprocess.run(command, cwd=dist, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = dist.glob("*.whl")
    return built


def test_wheel_holds_every_module_once(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names]
    modules = [name for name in modules if not name.startswith("isozyme.launch.scripts.")]
    assert sorted(modules) == sorted(module_name(file) for file in package_files())


def test_wheel_holds_the_data(wheel: Path) -> None:
    expected = {
        f"isozyme/{file.relative_to(ROOT)}" for glob in DATA for file in ROOT.glob(glob) if file.is_file()
    }
    assert expected, "no data files in the source tree"
    assert expected | {"isozyme/py.typed"} <= set(zipfile.ZipFile(wheel).namelist())


def test_wheel_offers_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "isozyme = isozyme.launch.cli:main" in archive.read(entry_points).decode()


def test_wheel_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    wheel_smoke.install(wheel, tmp_path / "installed")
    assert "modules imported from the wheel" in wheel_smoke.import_all(tmp_path / "installed", elsewhere)
