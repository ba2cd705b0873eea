"""The report of a whole run as a page: what was killed by which claim, how soon, and what was not."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

HEAD = """# Does the toolkit find faults? A mutation test

Written by `make mutants ARGS=--write-report` (`python -m tests.mutants.run --write-report`); do not edit it.

A mutant is isozyme with one small fault: a piece of one source file is replaced by another one. Each is an
example of what goes wrong in routing, dispatch, experts or the reduction of gradients; *row* is the fault of
[the catalogue](faults.md) that it belongs to. The toolkit `isozyme.moe.testing`, not our unit tests, has to
notice it, in a search with the default budget. A mutant is *killed* by the claim in the table
([the reference](reference.md) says what each claims).

- Each mutant runs in a process of its own. Nothing is written to the tree.
- *Seconds* is processor time, of all threads, from the call of the check to the first violation; starting
  Python and importing isozyme are not in it. Finding the *smallest* world takes longer; the claim in the
  table is the one that is reported in the end.
- All checks run on the unchanged code as well, and must find nothing.
- A layer is compared, at every layout, with one rank. In a check `by definition` that one rank is
  `tests/mutants/twin.py`, the layer written as loops over tokens and experts; so a fault that is the same at
  every layout is found too. With the gradients it compares the sums of the losses, the counts of slots and,
  in `training`, the balance bias, the norm of the gradient and the updated weights of a step of two
  micro-batches.
"""


def report(verdicts: Sequence[Any]) -> str:
    """The page `docs/testing/mutants.md` for the verdicts of a whole run."""
    unchanged = [each for each in verdicts if each.mutant is None]
    mutants = [each for each in verdicts if each.mutant is not None]
    equivalent = [each for each in mutants if each.mutant.equivalent]
    counted = [each for each in mutants if not each.mutant.equivalent]
    killed = [each for each in counted if each.outcome == "killed"]
    lines = [HEAD, "## Result", ""]
    lines.append(f"- {len(killed)} of {len(counted)} mutants are killed. {_survivors(counted)}")
    if killed:
        times = [each.cpu for each in killed]
        lines.append(
            f"- Seconds to the first violation: median {median(times):.2f}, at most {max(times):.2f} "
            f"(`{max(killed, key=lambda each: each.cpu).name}`)."
        )
    rows = sorted({each.mutant.row for each in killed if each.mutant.row is not None})
    other = sum(each.mutant.row is None for each in killed)
    lines.append(
        f"- {len(killed) - other} are examples of {len(rows)} rows of the catalogue "
        f"({', '.join(map(str, rows))}), {other} are other faults. The rows without a mutant are about "
        "checkpoints and the refusal of a configuration, which this toolkit does not look at."
    )
    crashed = [each for each in killed if each.claim == "the_program_runs_to_its_end"]
    lines.append(f"- {len(crashed)} show as an error of the code itself, which many a test would notice.")
    worlds = sum(each.worlds for each in unchanged)
    false = [each for each in unchanged if each.outcome != "survived"]
    lines.append(
        f"- The {len(unchanged)} checks of the unchanged code find nothing in {worlds} worlds."
        if not false
        else f"- {len(false)} checks of the unchanged code FAIL: {', '.join(each.subject for each in false)}."
    )
    lines += ["- Offsets that overflow are scaled down: the two mutants of row 14 wrap at 64 and at 16.", ""]
    lines += ["## Mutants", "", "| mutant | row | what is wrong | check | killed by | seconds |"]
    lines.append("|---|---|---|---|---|---|")
    lines += [_row(each) for each in counted]
    lines += ["", "## Equivalent", "", *(_equivalent(each) for each in equivalent), ""]
    return "\n".join(lines)


def _survivors(counted: Sequence[Any]) -> str:
    left = [f"`{each.name}` ({each.outcome})" for each in counted if each.outcome != "killed"]
    return f"Not killed: {', '.join(left)}." if left else "None survives."


def _row(verdict: Any) -> str:
    mutant = verdict.mutant
    by = f"`{verdict.claim}`" if verdict.outcome == "killed" else f"**{verdict.outcome}**"
    cells = (f"`{mutant.id}`", mutant.row or "", mutant.says, verdict.subject, by, f"{verdict.cpu:.2f}")
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _equivalent(verdict: Any) -> str:
    told = "survives, as it must" if verdict.outcome == "survived" else f"is {verdict.outcome}, against this:"
    return f"- `{verdict.name}` ({verdict.mutant.says}) {told}. {verdict.mutant.equivalent}"
