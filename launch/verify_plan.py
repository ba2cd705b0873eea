"""What `isozyme verify` runs: which layouts, dispatchers and backends, of a reduced model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from isozyme.core.config import RunConfig
from isozyme.core.errors import Rules
from isozyme.core.tensor import tensor_problems
from isozyme.core.topology import Layout, Topology
from isozyme.launch.verify_judge import Outcome, Reference, judge
from isozyme.launch.verify_reduced import Windows, reduced
from isozyme.launch.verify_run import Experiment, Setting
from isozyme.models.decoder import build_model
from isozyme.models.types import ModelFactory
from isozyme.moe.experts.registry import BACKENDS, ExpertSetting

BOTH = (torch.float64, torch.float32)


def prepare(config: RunConfig, layouts: Sequence[Layout], factory: ModelFactory = build_model) -> Experiment:
    """The reduced model and its data.

    Args:
        config: the run to be verified.
        layouts: all that will be compared.
        factory: builds the model.

    Raises:
        ConfigError: listing what is wrong with any of the layouts.
    """
    rules = Rules("verify")
    for layout in layouts:
        rules.extend(layout.problems())
        if factory is build_model:
            rules.extend(f"{layout}: {problem}" for problem in _whole_model_problems(config, layout))
    rules.raise_if_broken()
    small = reduced(config, layouts)
    for layout in layouts:
        at = replace(small, layout=layout)
        rules.extend(f"{layout}: {problem}" for problem in at.problems())
    rules.raise_if_broken()
    return Experiment(config=small, factory=factory, windows=Windows(small, layouts))


def _whole_model_problems(config: RunConfig, layout: Layout) -> list[str]:
    """Why the run itself cannot be cut so; the reduced model may be more patient."""
    if config.model.problems() or layout.problems():
        return []
    return tensor_problems(config.model, layout, config.data.window)


def settings(
    config: RunConfig,
    layouts: Sequence[Layout],
    *,
    dtypes: Sequence[torch.dtype],
    dispatchers: Sequence[str] | None = None,
) -> list[Setting]:
    """All combinations to run: layouts x dispatchers, fp64 with loop experts, fp32 with each CPU backend."""
    names = list(dispatchers) if dispatchers else ["alltoall", "allgather"]
    if config.model.moe.pad_to_capacity:
        names = [name for name in names if name == "alltoall"]
    if "M" not in config.model.layer_kinds():
        names = names[:1]
    return [
        Setting(layout=layout, dtype=dtype, dispatcher=name, experts=experts)
        for dtype in dtypes
        for layout in layouts
        for name in names
        for experts in (["loop"] if dtype == torch.float64 else backends(config, layout, dtype))
    ]


def backends(config: RunConfig, layout: Layout, dtype: torch.dtype) -> list[str]:
    """The expert backends that can run the reduced model on the CPU, the reference first."""
    moe = config.model.moe
    setting = ExpertSetting(
        device=torch.device("cpu"),
        dtype=dtype,
        num_local_experts=moe.router.num_experts // layout.ep,
        hidden=config.model.hidden,
        ffn=moe.ffn // layout.etp,
        precision="fp64" if dtype == torch.float64 else "fp32",
    )
    return sorted((b.name for b in BACKENDS if not b.problems(setting)), key=lambda name: name != "loop")


def verify(
    experiment: Experiment,
    layouts: Sequence[Layout],
    *,
    dtypes: Sequence[torch.dtype] = BOTH,
    dispatchers: Sequence[str] | None = None,
    progress: Callable[[Setting], None] | None = None,
) -> list[Outcome]:
    """Compare every layout with one rank.

    Args:
        experiment: see `prepare`.
        layouts: what to compare.
        dtypes: fp64, fp32 or both.
        dispatchers: names to try at every layout; by default all-to-all and all-gather.
        progress: told each setting before it is run.
    """
    references = {dtype: Reference.of(experiment, dtype) for dtype in dtypes}
    outcomes = []
    for setting in settings(experiment.config, layouts, dtypes=dtypes, dispatchers=dispatchers):
        if progress is not None:
            progress(setting)
        outcomes.append(judge(experiment, setting, references[setting.dtype]))
    return outcomes


def default_layouts(config: RunConfig) -> list[Layout]:
    """One rank, two replicas, and experts spread over two ranks without and with replicas of them."""
    layouts = [Layout(dp=1), Layout(dp=2)]
    if "M" in config.model.layer_kinds() and config.model.moe.router.num_experts % 2 == 0:
        layouts += [Layout(dp=2, ep=2), Layout(dp=4, ep=2)]
    wanted = config.layout.resolved()
    return layouts if wanted in layouts or Topology(wanted).world_size > 8 else [*layouts, wanted]
