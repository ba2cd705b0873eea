"""The mutants fit the source, and the representative ones are killed; `make mutants` judges all of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.mutants.apply import ROOT, StaleMutantError, install, mutated
from tests.mutants.catalogue import EVERY, MUTANTS, REPRESENTATIVE
from tests.mutants.mutant import Mutant

PARTS = 3


def example(**changes: str) -> Mutant:
    given = {"file": "moe/permute.py", "old": "def sort_slots(", "new": "def sort_slot(", **changes}
    return Mutant(id="example", row=None, says="", subject="local", **given)


def test_ids_are_unique() -> None:
    assert len(MUTANTS) == len(EVERY)


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.id)
def test_a_mutant_fits_the_source_once_and_is_python(mutant: Mutant) -> None:
    ast.parse(mutated(mutant))


def test_a_mutant_whose_text_is_gone_or_stands_twice_is_stale() -> None:
    for old in ("no such text", "slots: SlotMap"):
        with pytest.raises(StaleMutantError, match="stale mutant example"):
            mutated(example(old=old))
    with pytest.raises(StaleMutantError, match=re.escape("there is no moe/gone.py")):
        mutated(example(file="moe/gone.py"))


def test_a_mutant_is_not_put_into_a_process_that_has_the_package_already() -> None:
    import isozyme.moe.permute

    assert isozyme.moe.permute
    with pytest.raises(RuntimeError, match="before isozyme is imported"):
        install(example())


def test_a_mutant_changes_what_is_imported_and_no_file() -> None:
    text = (ROOT / "moe/permute.py").read_bytes()
    program = (
        "from tests.mutants.apply import install\nfrom tests.mutants.mutant import Mutant\n"
        "install(Mutant(id='x', row=None, says='', subject='', file='moe/permute.py',"
        " old='def sort_slots(', new='def sort_slot('))\n"
        "import isozyme.moe.permute as found\nassert hasattr(found, 'sort_slot')\n"
        "assert not hasattr(found, 'sort_slots')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (ROOT / "moe/permute.py").read_bytes() == text


def test_every_file_that_dispatch_consists_of_has_mutants() -> None:
    mutated_files = {mutant.file for mutant in EVERY}
    wanted = {
        f"moe/{name}.py"
        for name in (
            "permute",
            "grouping",
            "placement",
            "dispatch_local",
            "dispatch_allgather",
            "dispatch_alltoall",
            "dispatch_padded",
            "router",
            "scores",
            "losses",
            "capacity",
            "expert_bias",
            "experts/storage",
        )
    }
    assert wanted <= mutated_files


def test_the_report_lists_every_mutant_and_no_survivor() -> None:
    text = (ROOT / "docs" / "testing" / "mutants.md").read_text()
    missing = [name for name in MUTANTS if f"`{name}`" not in text]
    assert not missing, "run make mutants ARGS=--write-report"
    assert "None survives." in text
    assert "FAIL" not in text


@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_representative_mutants_are_killed(part: int) -> None:
    ids = REPRESENTATIVE[part::PARTS]
    command = [sys.executable, "-m", "tests.mutants.run", "--until-first", "--workers", "1", *ids]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  killed ") == len(ids)
