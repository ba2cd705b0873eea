"""Judging mutants, each in a process of its own: `python -m tests.mutants.run [--write-report] [id …]`.

The processes are forked from a server that has imported torch and hypothesis but nothing of isozyme, so each
imports its own package with the mutant in it. Times are measured inside, from the call of the check to the
first violation, as processor time (all threads, user and system) and by the clock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from tests.mutants.apply import ROOT, StaleMutantError, install, mutated
from tests.mutants.catalogue import MUTANTS, REPRESENTATIVE
from tests.mutants.mutant import Mutant
from tests.mutants.report import report

LONGEST = 240.0
"""Seconds by the clock after which a check is taken to hang."""
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "hypothesis.strategies", "einops", "jaxtyping"]


@dataclass(kw_only=True)
class Verdict:
    """What became of one mutant, or of the unchanged code (`mutant` is None)."""

    subject: str
    mutant: Mutant | None = None
    outcome: str = "hung"
    """`killed`, `survived`, `broken` (an error that is no violation), `stale` or `hung`."""
    claim: str = ""
    """The claim that was refuted."""
    text: str = ""
    """The violation or error in words."""
    worlds: int = 0
    cpu: float = 0.0
    """Seconds of processor time to the first violation, or of the whole check if there was none."""
    wall: float = 0.0
    """The same by the clock."""
    total_cpu: float = 0.0
    """Seconds of processor time of the whole check, the search for the smallest world included."""

    @property
    def name(self) -> str:
        """The mutant's id."""
        return f"unchanged: {self.subject}" if self.mutant is None else self.mutant.id

    @property
    def as_wanted(self) -> bool:
        """Whether a mutant was killed, and what is right (or equivalent to it) was not."""
        harmless = self.mutant is None or bool(self.mutant.equivalent)
        return self.outcome == ("survived" if harmless else "killed")

    def line(self) -> str:
        """One line for the terminal."""
        sign = " " if self.as_wanted else "!"
        what = self.claim or (self.text.strip().splitlines() or [""])[0]
        return f"{sign} {self.outcome:8} {self.cpu:6.2f} s {self.total_cpu:6.1f} s  {self.name}: {what}"


def judge(subject: str, mutant: Mutant | None, channel: Connection) -> None:
    """Runs in the child: send `(what, verdict)` for the first violation, if any, and at the end."""
    verdict = Verdict(subject=subject, mutant=mutant)
    try:
        if mutant is not None:
            install(mutant)
        _check(verdict, channel)
        if mutant is not None and mutant.module not in sys.modules:
            verdict.outcome, verdict.text = "broken", f"{mutant.module} was not imported by this check."
    except Exception:
        verdict.outcome, verdict.text = "broken", traceback.format_exc()
    channel.send(("end", verdict))


def _check(verdict: Verdict, channel: Connection) -> None:
    import torch

    from isozyme.moe.testing import Violation
    from tests.mutants.subjects import SUBJECTS

    torch.set_num_threads(1)
    check = SUBJECTS[verdict.subject]
    began, began_cpu = time.monotonic(), time.process_time()
    build = Violation.__init__

    def first(violation: Violation, invariant: str, finding: str) -> None:
        build(violation, invariant, finding)
        if not verdict.claim:
            verdict.outcome, verdict.claim, verdict.text = "killed", invariant, finding
            verdict.cpu, verdict.wall = time.process_time() - began_cpu, time.monotonic() - began
            channel.send(("first", verdict))

    Violation.__init__ = first  # type: ignore[method-assign]
    try:
        found = check()
    except Violation as violation:
        verdict.outcome, verdict.claim, verdict.text = "killed", violation.invariant, str(violation)
    else:
        verdict.outcome, verdict.claim, verdict.worlds = "survived", "", found.worlds
        verdict.cpu, verdict.wall = time.process_time() - began_cpu, time.monotonic() - began
    verdict.total_cpu = time.process_time() - began_cpu


def run(pair: tuple[str, Mutant | None], *, until_first: bool) -> Verdict:
    """Judge one mutant in a child; with `until_first`, only as far as the first violation."""
    subject, mutant = pair
    verdict = Verdict(subject=subject, mutant=mutant)
    if mutant is not None:
        try:
            mutated(mutant)
        except StaleMutantError as error:
            verdict.outcome, verdict.text = "stale", str(error)
            return verdict
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=judge, args=(subject, mutant, theirs), daemon=True)
    child.start()
    theirs.close()
    last = time.monotonic() + LONGEST
    try:
        while ours.poll(max(last - time.monotonic(), 0.0)):
            what, found = ours.recv()
            if what == "end" or until_first:
                return found
    except EOFError:
        verdict.outcome, verdict.text = "broken", "the process ended without a verdict."
    finally:
        child.kill()
        child.join()
    return verdict


def chosen(ids: Sequence[str], *, controls: bool) -> list[tuple[str, Mutant | None]]:
    """The mutants of these ids with their subjects; with `controls`, before them each subject unchanged.

    Raises:
        SystemExit: for an id that there is not.
    """
    unknown = [name for name in ids if name not in MUTANTS]
    if unknown:
        raise SystemExit(f"there is no mutant {', '.join(unknown)}.")
    mutants = [MUTANTS[name] for name in ids]
    subjects = sorted({mutant.subject for mutant in mutants}) if controls else []
    return [*((subject, None) for subject in subjects), *((mutant.subject, mutant) for mutant in mutants)]


def main() -> int:
    """Judge mutants, print a line for each, and say whether all went as it must."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("ids", nargs="*", help="which mutants; by default all, and the unchanged code")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--representative", action="store_true", help="only those of `make test`")
    parser.add_argument("--until-first", action="store_true", help="do not look for the smallest world")
    parser.add_argument("--write-report", action="store_true", help="write docs/testing/mutants.md")
    options = parser.parse_args()
    every = not options.ids and not options.representative
    ids = options.ids or (REPRESENTATIVE if options.representative else list(MUTANTS))
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    began = time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool:
        verdicts = []
        work = partial(run, until_first=options.until_first)
        for verdict in pool.map(work, chosen(ids, controls=every)):
            verdicts.append(verdict)
            print(verdict.line(), flush=True)
    wrong = [verdict for verdict in verdicts if not verdict.as_wanted]
    for verdict in wrong:
        print(f"\n--- {verdict.name} ({verdict.outcome}), {verdict.subject}\n{verdict.text}")
    cpu = sum(verdict.total_cpu for verdict in verdicts)
    wall = time.monotonic() - began
    print(f"\n{len(verdicts)} runs, {len(wrong)} not as wanted; {wall:.0f} s, checks {cpu:.0f} s CPU")
    if options.write_report:
        if not every or options.until_first:
            raise SystemExit("a report needs all mutants, judged to the end: no ids, no --until-first.")
        (ROOT / "docs" / "testing" / "mutants.md").write_text(report(verdicts))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
