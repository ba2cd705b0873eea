"""Where the sources are: the folders, files and module names that the tests of the repository walk over."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREES = ("core", "parallel", "moe", "models", "launch")


def package_files() -> list[Path]:
    """Every Python file of the package, scripts among its data left out."""
    files = [ROOT / "src" / "isozyme" / "__init__.py"]
    for tree in TREES:
        packages = {init.parent for init in (ROOT / tree).rglob("__init__.py")}
        files += sorted(file for package in packages for file in package.glob("*.py"))
    return files


def module_name(file: Path) -> str:
    """The name under which a file of the package is imported.

    >>> module_name(ROOT / "core" / "errors.py")
    'isozyme.core.errors'
    """
    parts = (
        file.relative_to(ROOT / "src" if file.is_relative_to(ROOT / "src") else ROOT).with_suffix("").parts
    )
    name = ".".join(part for part in parts if part != "__init__")
    return name if name.startswith("isozyme") else f"isozyme.{name}"


def importable_modules() -> list[str]:
    """Every module of the package that may be imported without running a program."""
    return [name for name in map(module_name, package_files()) if not name.endswith("__main__")]
