"""What verification prints: a table with one line a setting, and a paragraph for each that failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isozyme.launch.verify_all import Verdict
from isozyme.launch.verify_compare import Comparison, Kind
from isozyme.launch.verify_judge import FLIP_GAP, TOLERANCE, Outcome
from isozyme.launch.verify_trials import Trial


def outcome_table(outcomes: Iterable[Outcome], kinds: Sequence[str] = ()) -> Table:
    """One line a setting: the largest differences from the reference, and the verdict.

    Args:
        outcomes: of the settings.
        kinds: for each of them what kind of model it was; none if it was always the same.
    """
    table = Table(
        title="largest differences from one rank with loop experts",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    if kinds:
        table.add_column("kind", overflow="fold")
    for heading in ("layout", "dtype", "dispatcher", "experts"):
        table.add_column(heading, no_wrap=True)
    for heading in ("loss", "gradient", "norm", "weights", "flips"):
        table.add_column(heading, justify="right", no_wrap=True)
    if not kinds:
        table.add_column("worst gradient", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for number, outcome in enumerate(outcomes):
        setting, found = outcome.setting, outcome.comparison
        worst = found.worst("gradient") if found is not None else None
        table.add_row(
            *kinds[number : number + 1],
            str(setting.layout),
            _short(str(setting.dtype)),
            setting.dispatcher,
            setting.experts,
            *_numbers(found),
            str(len(outcome.flips)),
            *([] if kinds else [worst.name if worst is not None and worst.error > 0 else ""]),
            _verdict(outcome.passed),
        )
    return table


def fault_table(trials: Sequence[Trial]) -> Table:
    """One line a fault: whether verification finds it, and by what."""
    table = Table(title="faults made on purpose: each must be found")
    for heading in ("fault", "what goes wrong", "where", "found by", "verdict"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "verdict")
    for trial in trials:
        if trial.outcome is None:
            where, words, verdict = (
                str(trial.fault.layout),
                trial.refused,
                Text("not possible", style="yellow"),
            )
        else:
            where, words = str(trial.outcome.setting.layout), evidence(trial.outcome)
            verdict = Text("MISSED", style="bold red") if trial.missed else Text("found", style="green")
        table.add_row(trial.fault.name, trial.fault.says, where, Text(words), verdict)
    return table


def evidence(outcome: Outcome) -> str:
    """In a few words, what gave a wrong setting away; empty if it passed."""
    if outcome.error is not None:
        return outcome.error.split("\n")[0].split(":")[0]
    found, tolerance = outcome.comparison, outcome.tolerance
    assert found is not None
    parts = [f"{len(outcome.wrong_flips)} flips"] if outcome.wrong_flips else []
    kinds: Mapping[Kind, str] = {"gradient": "gradient", "weight": "weights"}
    scalars = {"loss": found.loss, "norm": found.norm}
    parts += [f"{name} {value:.0e}" for name, value in scalars.items() if not value <= tolerance]
    for kind, word in kinds.items():
        worst = found.worst(kind)
        if worst is not None and not worst.error <= tolerance:
            parts.append(f"{word} {worst.error:.0e} ({worst.name})")
    return ", ".join([*parts, *found.missing[:1]])


def print_outcomes(outcomes: Sequence[Outcome], console: Console, kinds: Sequence[str] = ()) -> bool:
    """Print the table, why each setting failed, and the sum of it; returns whether all passed."""
    console.print(outcome_table(outcomes, kinds))
    for outcome in outcomes:
        if not outcome.passed:
            console.print(Text(f"\nFAILED {outcome.explain()}"), soft_wrap=True)
        elif outcome.flips:
            setting, worst = outcome.setting, max(flip.gap for flip in outcome.flips)
            note = (
                f"{setting.layout}, {_short(str(setting.dtype))}: {len(outcome.flips)} near-ties were "
                f"replayed; largest score gap {worst:.1e}, allowed {FLIP_GAP[setting.dtype]:.0e}"
            )
            console.print(Text(note), soft_wrap=True)
    failed = sum(not outcome.passed for outcome in outcomes)
    limits = ", ".join(f"{limit:.0e} in {_short(str(dtype))}" for dtype, limit in TOLERANCE.items())
    verdict = (
        f"{failed} of {len(outcomes)} settings FAILED" if failed else f"all {len(outcomes)} settings agree"
    )
    console.print(Text(f"\n{verdict} (tolerance {limits})"), soft_wrap=True)
    return failed == 0


def print_verdicts(verdicts: Sequence[Verdict], console: Console) -> bool:
    """Print one table of all families, and what the recipe cannot have; returns whether all passed."""
    drawn = [verdict.family for verdict in verdicts if verdict.family.name.startswith("draw")]
    for family in drawn:
        console.print(Text(f"{family.name}: {' '.join(family.overrides) or 'as it is'}"), soft_wrap=True)
    for verdict in verdicts:
        for layout, why in verdict.refused:
            reason = why.split("\n")[-1].strip(" -")
            console.print(
                Text(f"not possible with this recipe: {verdict.family.name}, {layout}: {reason}"),
                soft_wrap=True,
            )
    pairs = [(verdict.family.name, outcome) for verdict in verdicts for outcome in verdict.outcomes]
    passed = print_outcomes([outcome for _, outcome in pairs], console, [kind for kind, _ in pairs])
    layouts = {str(outcome.setting.layout) for _, outcome in pairs}
    refused = sum(len(verdict.refused) for verdict in verdicts)
    console.print(
        f"{len(layouts)} different layouts; {refused} of the list are not possible with this recipe"
    )
    return passed and bool(pairs)


def _numbers(found: Comparison | None) -> list[str]:
    if found is None:
        return ["-"] * 4
    gradient, weight = found.worst("gradient"), found.worst("weight")
    values = [found.loss, gradient.error if gradient else 0.0, found.norm, weight.error if weight else 0.0]
    return [f"{value:.1e}" for value in values]


def _verdict(passed: bool) -> Text:
    return Text("ok", style="green") if passed else Text("FAILED", style="bold red")


def _short(dtype: str) -> str:
    return {"torch.float64": "fp64", "torch.float32": "fp32"}.get(dtype, dtype)
