"""Install a wheel into an empty folder and import all of it from a third folder: `wheel_smoke.py dist/*.whl`.

The dependencies come from the environment that runs this file; the package must not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORT_ALL = """
import importlib.util, pkgutil, sys
from importlib.resources import files
import isozyme
installed, = sys.argv[1:]
found = [module.name for module in pkgutil.walk_packages(isozyme.__path__, "isozyme.")]
modules = [name for name in found if not name.endswith("__main__")]
for tree in ("core", "parallel", "moe", "models", "launch"):
    package = importlib.import_module(f"isozyme.{tree}")
    assert package.__file__.startswith(installed), f"{package.__file__} is not in {installed}"
assert importlib.util.find_spec("core") is None, "core is importable beside isozyme.core"
assert files("isozyme").joinpath("py.typed").is_file(), "py.typed is missing"
for name in modules:
    importlib.import_module(name)
print(f"isozyme {isozyme.__version__}: {len(modules)} modules imported from the wheel")
"""


def install(wheel: Path, folder: Path) -> None:
    """Unpack the wheel into `folder`, without dependencies."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-cache-dir"]
    subprocess.run([*command, "--target", folder, wheel], check=True)


def import_all(installed: Path, folder: Path) -> str:
    """Import every module of the package in `installed`, with `folder` as working directory."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", IMPORT_ALL, str(installed)]
    result = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    if result.returncode:
        raise RuntimeError(f"the wheel cannot be imported from {folder}:\n{result.stdout}{result.stderr}")
    return result.stdout


def main(wheel: Path) -> None:
    """Install and import one wheel in temporary folders."""
    with tempfile.TemporaryDirectory() as root:
        installed, elsewhere = Path(root).resolve() / "installed", Path(root) / "elsewhere"
        elsewhere.mkdir()
        install(wheel.resolve(), installed)
        print(import_all(installed, elsewhere), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
