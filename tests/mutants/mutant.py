"""One mutant: a small wrong change of one source file, and the check that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """The text `old`, which stands exactly once in `file`, is replaced by `new`."""

    id: str
    row: int | None
    """The row of docs/testing/faults.md that it is an example of, if any."""
    says: str
    """What is wrong with it, in a sentence."""
    file: str
    """Relative to the repository's root."""
    old: str
    new: str
    subject: str
    """The subject (see `tests.mutants.subjects`) whose check must refute it."""
    equivalent: str = ""
    """Why no check can tell it from the original; then it must survive."""

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        return "isozyme." + self.file.removesuffix(".py").replace("/", ".")
