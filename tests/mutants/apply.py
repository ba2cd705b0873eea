"""Putting a mutant in place: in this process, at import, and nowhere else.

The source is read from the tree, changed in memory and compiled from there. No file is written, not even
bytecode, so other processes and the working tree never see a mutant. It is meant for a process that does
nothing but judge this one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]


class StaleMutantError(Exception):
    """A mutant no longer fits the source that it changes."""


def mutated(mutant: Mutant) -> str:
    """The whole text of the mutant's file.

    Raises:
        StaleMutantError: if the text to replace does not stand exactly once in the file, or stays the same.
    """
    path = ROOT / mutant.file
    if not path.is_file():
        raise StaleMutantError(f"stale mutant {mutant.id}: there is no {mutant.file}.")
    text = path.read_text()
    found = text.count(mutant.old)
    if found != 1 or mutant.new == mutant.old:
        raise StaleMutantError(
            f"stale mutant {mutant.id}: its text must stand once in {mutant.file}, and change; it stands "
            f"{found} times. Write the mutant anew for the present source, or remove it:\n{mutant.old}"
        )
    return text.replace(mutant.old, mutant.new)


def install(mutant: Mutant) -> None:
    """From now on, an import of the mutant's module gives the mutant.

    Raises:
        StaleMutantError: see `mutated`.
        RuntimeError: if the package was imported before.
    """
    if any(name == "isozyme" or name.startswith("isozyme.") for name in sys.modules):
        raise RuntimeError("a mutant must be in place before isozyme is imported.")
    sys.meta_path.insert(0, _Finder(mutant.module, mutated(mutant)))


class _Finder(MetaPathFinder):
    def __init__(self, module: str, text: str) -> None:
        self._module, self._text = module, text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._text)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, text: str) -> None:
        super().__init__(fullname, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text.encode(), self.get_filename(fullname))
