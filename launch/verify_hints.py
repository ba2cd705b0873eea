"""What the differences of a failed layout look like from near, and what they point to.

One fault spoils everything after it, so only the first step at which anything differs is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from isozyme.launch.verify_compare import LOSSES, Comparison, Difference

SHOWN = 5
"""Tensors named in a message."""


def symptoms(comparison: Comparison, tolerance: float) -> list[str]:
    """What is past the tolerance at the first step that differs, the worst first, one line a tensor."""
    step = comparison.first_step(tolerance)
    if step is None:
        return list(comparison.missing[:SHOWN])
    errors = dict(
        zip((*LOSSES, "gradient norm"), (*comparison.losses[step], comparison.norms[step]), strict=True)
    )
    lines = [
        f"{name}, step {step}: error {error:.2e}" for name, error in errors.items() if not error <= tolerance
    ]
    by_tensor: dict[tuple[str, str], list[Difference]] = {}
    for each in _at(comparison, tolerance, step):
        by_tensor.setdefault((each.kind, each.name), []).append(each)
    for (kind, name), found in list(by_tensor.items())[:SHOWN]:
        worst = found[0]
        factor = f", {worst.ratio:.4g} times the reference" if worst.proportional else ""
        ranks = ", ".join(str(rank) for rank in sorted(each.rank for each in found))
        others = f"; past the tolerance on ranks {ranks}" if len(found) > 1 else ""
        lines.append(f"{kind} of {name}, step {step}, {worst.where}: error {worst.error:.2e}{factor}{others}")
    if len(by_tensor) > SHOWN:
        lines.append(f"and {len(by_tensor) - SHOWN} more tensors past {tolerance:.0e} at step {step}")
    return [*lines, *comparison.missing[:SHOWN]]


def hints(comparison: Comparison, tolerance: float, sizes: Mapping[str, int], num_ranks: int) -> list[str]:
    """What the differences of a failed layout point to, in words.

    Args:
        comparison: the layout against the reference.
        tolerance: what the layout went past.
        sizes: ranks along each axis.
        num_ranks: all ranks.
    """
    step = comparison.first_step(tolerance)
    if step is None:
        return []
    here = _at(comparison, tolerance, step)
    gradients = [each for each in here if each.kind == "gradient"]
    found = [*_factors(gradients, sizes), *_places(here, num_ranks)]
    loss, norm = max(comparison.losses[step]), comparison.norms[step]
    if step > 0:
        found.append(
            f"everything agrees before step {step}: the update, or the state that it keeps (replicas that "
            "drift, clipping, moments, a balance bias), depends on the layout"
        )
    elif loss > tolerance:
        found.append("the loss of the first step differs: look at the forward pass, and at what losses count")
    elif gradients:
        found.append(
            "the loss agrees, gradients do not: look at backward passes, reductions and loss weights"
        )
    elif norm > tolerance:
        found.append(
            "all gradients agree, the norm does not: a shard is left out or counted more than once (each has "
            "weight 1/replicas; squares are summed over all ranks)"
        )
    if comparison.drifted:
        name, ranks = next(iter(comparison.drifted.items()))
        found.append(
            f"replicas differ from each other: {name} on rank {', '.join(map(str, ranks))}"
            f"{_more(len(comparison.drifted) - 1, 'weights')}"
        )
    return found


def _at(comparison: Comparison, tolerance: float, step: int) -> list[Difference]:
    return [each for each in comparison.beyond(tolerance) if each.step == step]


def _factors(gradients: Sequence[Difference], sizes: Mapping[str, int]) -> list[str]:
    """Gradients that are too large or small by the size of an axis, or zero, and nothing else."""
    factors: dict[str, set[str]] = {}
    for each in gradients:
        if not each.proportional:
            continue
        for word, ratio in (("large", each.ratio), ("small", 1 / each.ratio if each.ratio else math.nan)):
            axes = [axis for axis, size in sizes.items() if size > 1 and abs(ratio - size) < 1e-3 * size]
            if axes:
                axis = f"{' or '.join(axes)} ({sizes[axes[0]]}) times too {word}"
                factors.setdefault(axis, set()).add(each.name)
        if each.ratio == 0:
            factors.setdefault("zero", set()).add(each.name)
    return [f"the gradient is {factor}: {_names(names)}" for factor, names in factors.items()]


def _places(here: Sequence[Difference], num_ranks: int) -> list[str]:
    """Whether the differences are confined to some ranks, or to dense or expert tensors."""
    if not here:
        return []
    found = []
    ranks = sorted({each.rank for each in here})
    if len(ranks) < num_ranks:
        found.append(f"only rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {num_ranks} differ")
    grids = {each.grid for each in here}
    if len(grids) == 1:
        found.append(f"only {grids.pop()} tensors differ: {_names({each.name for each in here})}")
    return found


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + _more(len(names) - 3, "tensors")


def _more(count: int, what: str) -> str:
    return f" and {count} more {what}" if count > 0 else ""
