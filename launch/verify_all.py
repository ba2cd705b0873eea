"""`isozyme verify --all`: every family of layouts and models, on one or several processes.

A family is composed, reduced and compared with one rank by itself, so families are independent pieces of
work. A layout that the recipe cannot have (its experts or heads do not divide) is named with its reason and
not counted as verified.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.launch.compose import compose
from isozyme.launch.verify_families import DEFAULT_MODEL, DEFAULT_RECIPE, FAMILIES, Family, draws
from isozyme.launch.verify_judge import Outcome, Reference, judge
from isozyme.launch.verify_plan import BOTH, prepare, settings
from isozyme.launch.verify_run import Setting
from isozyme.models.types import ModelFactory

DRAWS = 6
ONE_RANK = tuple(f"layout.{field.name}=1" for field in fields(Layout) if field.name != "order")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is verified: picklable, so that any process can make it."""

    recipe: str = DEFAULT_RECIPE
    overrides: tuple[str, ...] = DEFAULT_MODEL
    seed: int | None = None
    """Of weights, data and draws; the recipe's if None."""
    factory: ModelFactory

    def config(self, family: Family) -> RunConfig:
        """The run that a family compares.

        Raises:
            ConfigError: if the recipe cannot be changed so.
        """
        config = compose(self.recipe, [*self.overrides, *ONE_RANK, *family.overrides])
        return config if self.seed is None else replace(config, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one family."""

    family: Family
    outcomes: Sequence[Outcome]
    refused: Sequence[tuple[Layout, str]] = ()
    """The layouts that this recipe cannot have, and why."""


def families_of(subject: Subject, num_draws: int = DRAWS) -> list[Family]:
    """The fixed families, and the drawn ones that the subject can have."""

    def possible(family: Family, layout: Layout) -> bool:
        return problem(subject, family, layout) is None

    seed = subject.config(FAMILIES[0]).seed
    return [*FAMILIES, *draws(seed, num_draws, possible)]


def problem(subject: Subject, family: Family, layout: Layout) -> str | None:
    """Why the subject cannot be cut so; None if it can."""
    try:
        prepare(subject.config(family), [layout], subject.factory)
    except ConfigError as error:
        return str(error)
    return None


def verify_family(subject: Subject, family: Family, dtypes: Sequence[torch.dtype] = BOTH) -> Verdict:
    """Compare one family with one rank, in fp64, fp32 (where the family says so), or both."""
    found = {layout: problem(subject, family, layout) for layout in family.layouts}
    refused = [(layout, why) for layout, why in found.items() if why is not None]
    layouts = [layout for layout, why in found.items() if why is None]
    if not layouts:
        return Verdict(family=family, outcomes=(), refused=refused)
    experiment = prepare(subject.config(family), layouts, subject.factory)
    chosen: list[Setting] = []
    for dtype in dtypes:
        wanted = [layout for layout in layouts if dtype == torch.float64 or layout in family.fp32]
        names = [family.dispatcher]
        chosen += settings(experiment.config, wanted, dtypes=[dtype], dispatchers=names)
    references = {
        dtype: Reference.of(experiment, dtype) for dtype in dict.fromkeys(each.dtype for each in chosen)
    }
    outcomes = [judge(experiment, setting, references[setting.dtype]) for setting in chosen]
    return Verdict(family=family, outcomes=outcomes, refused=refused)


def verify_families(
    subject: Subject,
    families: Sequence[Family],
    *,
    dtypes: Sequence[torch.dtype] = BOTH,
    workers: int = 1,
    progress: Callable[[Family], None] | None = None,
) -> list[Verdict]:
    """Compare several families, on `workers` processes.

    Args:
        subject: what is verified.
        families: which kinds and layouts.
        dtypes: fp64, fp32 or both.
        workers: processes; each uses one thread.
        progress: told each family that is done.

    Returns:
        The verdicts in the order of the families.

    Raises:
        ConfigError: if there are no workers.
    """
    if workers < 1:
        raise ConfigError(f"there must be a worker: --workers={workers}. Use 1 or more.")
    found: dict[str, Verdict] = {}
    runs = _one_by_one if workers == 1 else partial(_spread, workers=workers)
    for verdict in runs(subject, families, dtypes):
        found[verdict.family.name] = verdict
        if progress is not None:
            progress(verdict.family)
    return [found[family.name] for family in families]


def _one_by_one(
    subject: Subject, families: Sequence[Family], dtypes: Sequence[torch.dtype]
) -> Iterator[Verdict]:
    for family in families:
        yield verify_family(subject, family, dtypes)


def _spread(
    subject: Subject, families: Sequence[Family], dtypes: Sequence[torch.dtype], *, workers: int
) -> Iterator[Verdict]:
    """The longest first, so that no process is left with one at the end."""
    ordered = sorted(families, key=_work, reverse=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        jobs = [pool.submit(verify_family, subject, family, dtypes) for family in ordered]
        for job in as_completed(jobs):
            yield job.result()


def _work(family: Family) -> int:
    return sum(Topology(layout).world_size for layout in (*family.layouts, *family.fp32))
