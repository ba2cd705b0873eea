"""`isozyme verify`: hold a layout, a dispatcher, a backend or your own model to one rank, value by value.

    isozyme verify RECIPE --layouts "dp=1" "dp=2 ep=1" "dp=2 ep=2" [--dtype fp64|fp32|both] [key=value ...]

A reduced model runs three optimiser steps on simulated ranks, through the training step of the trainer, at
every layout and with every dispatcher. Losses, all gradients, the norm and the weights of every replica on
every rank must equal those of one rank: within 1e-9 in fp64 (AdamW), within 1e-5 in fp32 (SGD, for each
expert backend that runs on the CPU). Exit code 0 if they do, 1 if not.

**Your own model**: `--model package.module:factory`. The factory is called on every rank as
`factory(config, groups, chunk, device, dtype)` (`isozyme.models.types.ModelFactory`) and returns a module
that follows `isozyme.models.types.Model`: `model(batch, hidden=None, routing_override=None) -> ModelOutput`,
losses as sums. Every parameter carries a `ShardSpec`; which values are compared follows from it. `config` is
the reduced run (`config.model`: hidden 32, the recipe's experts and topk, …; `config.model.moe.dispatcher`
and `.experts` name what is under test; a model with other parts may ignore them). Your own router is asked
for score gaps if it has `routing_flips(tokens, token_valid, override)`, as `isozyme.moe.router.Router` has;
else any flip is a fault.

    isozyme verify RECIPE --faults

runs faults made on purpose (`isozyme.launch.verify_faults`) and succeeds if every one of them is found.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError, Rules, divisors
from isozyme.core.topology import Layout, Topology
from isozyme.launch.cli import parse_layout
from isozyme.launch.compose import compose
from isozyme.launch.verify_faults import FAULTS, Fault
from isozyme.launch.verify_judge import Outcome, Reference, judge
from isozyme.launch.verify_reduced import Windows, reduced
from isozyme.launch.verify_report import fault_table, print_outcomes
from isozyme.launch.verify_routing import load_by_layer
from isozyme.launch.verify_run import Experiment, Setting
from isozyme.models.decoder import build_model
from isozyme.models.types import ModelFactory
from isozyme.moe.experts.registry import BACKENDS, ExpertSetting

DTYPES = {"fp64": (torch.float64,), "fp32": (torch.float32,), "both": (torch.float64, torch.float32)}
WIDTH = 120
"""Columns of what is written to a file or a pipe."""
AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "order")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the recipe")
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=[],
        metavar="LAYOUT",
        help='layouts such as "dp=2 ep=2"; by default one rank, dp=2, and dp=ep=2 where the experts allow',
    )
    parser.add_argument("--model", metavar="MODULE:FACTORY", help="verify a model of your own")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="both")
    parser.add_argument(
        "--dispatchers",
        nargs="+",
        choices=("alltoall", "allgather", "local", "auto"),
        metavar="NAME",
        help="default: alltoall allgather",
    )
    parser.add_argument("--seed", type=int, help="seed of weights and data; the recipe's by default")
    parser.add_argument("--faults", action="store_true", help="check that faults made on purpose are found")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (what follows `isozyme verify`) and run."""
    parser = argparse.ArgumentParser(prog="isozyme verify", description="hold a layout to one rank")
    add_arguments(parser)
    return run(parser.parse_intermixed_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Verify, print the table, and return the exit code.

    Raises:
        ConfigError: if a layout, an override or the named model is no good; nothing has been run then.
    """
    layouts, overrides = _split(arguments.layouts, arguments.overrides)
    config = compose(arguments.recipe, overrides)
    if arguments.seed is not None:
        config = replace(config, seed=arguments.seed)
    factory = build_model if arguments.model is None else load_factory(arguments.model)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if arguments.faults:
        return 0 if _faults(config, factory, console) else 1
    parsed = [parse_layout(text) for text in layouts] or default_layouts(config)
    experiment = prepare(config, parsed, factory)
    _describe(experiment, console)
    with console.status("running") as status:
        outcomes = verify(
            experiment,
            parsed,
            dtypes=DTYPES[arguments.dtype],
            dispatchers=arguments.dispatchers,
            progress=lambda setting: status.update(
                f"{setting.layout}, {setting.dispatcher}, {setting.experts}"
            ),
        )
    return 0 if print_outcomes(outcomes, console) else 1


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
    rules.raise_if_broken()
    small = reduced(config, layouts)
    for layout in layouts:
        at = replace(small, layout=layout)
        rules.extend(f"{layout}: {problem}" for problem in at.problems())
    rules.raise_if_broken()
    return Experiment(config=small, factory=factory, windows=Windows(small, layouts))


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
    )
    return sorted((b.name for b in BACKENDS if not b.problems(setting)), key=lambda name: name != "loop")


def verify(
    experiment: Experiment,
    layouts: Sequence[Layout],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES["both"],
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


def fault_layout(config: RunConfig) -> Layout:
    """The smallest layout at which every fault can show: experts spread over ranks, and replicas of them.

    Raises:
        ConfigError: if the model's experts cannot be spread.
    """
    experts = config.model.moe.router.num_experts
    if experts < 2 or "M" not in config.model.layer_kinds():
        raise ConfigError(
            f"--faults needs experts on several ranks: model.moe.router.num_experts={experts}, "
            f"model.pattern={config.model.pattern}. Use a recipe with at least two experts."
        )
    ep = divisors(experts)[1]
    return Layout(dp=2 * ep, ep=ep)


def find_faults(config: RunConfig, factory: ModelFactory = build_model) -> list[tuple[Fault, Outcome]]:
    """Make each fault on purpose and see whether verification finds it.

    Args:
        config: the run; the auxiliary losses are turned on if they are off.
        factory: builds the model.

    Raises:
        ConfigError: if the model fails without any fault, which would make this meaningless.
    """
    router = config.model.moe.router
    lossy = replace(router, aux_loss=router.aux_loss or 0.01, z_loss=router.z_loss or 1e-3)
    moe = replace(config.model.moe, router=lossy, capacity_factor=None, pad_to_capacity=False)
    config = replace(config, model=replace(config.model, moe=moe))
    layout = fault_layout(config)
    experiment = prepare(config, [layout], factory)
    reference = Reference.of(experiment, torch.float64)
    found = []
    for name in sorted({fault.dispatcher for fault in FAULTS}):
        healthy = judge(experiment, _at(layout, name), reference)
        if not healthy.passed:
            raise ConfigError(f"the model fails without a fault: {healthy.explain()}\nRepair it first.")
    for fault in FAULTS:
        found.append((fault, judge(experiment, _at(layout, fault.dispatcher), reference, fault=fault)))
    return found


def load_factory(name: str) -> ModelFactory:
    """The factory that `package.module:name` names; the current folder is searched as well.

    Raises:
        ConfigError: if there is no such thing, or it cannot be called.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"a model is named package.module:factory: --model={name}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"the model's module must be importable: --model={name}; {error}.") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(
            f"the model must be a factory: --model={name}; {module_name} has no callable {attribute}."
        )
    return found


def _at(layout: Layout, dispatcher: str) -> Setting:
    return Setting(layout=layout, dtype=torch.float64, dispatcher=dispatcher, experts="loop")


def _faults(config: RunConfig, factory: ModelFactory, console: Console) -> bool:
    found = find_faults(config, factory)
    console.print(fault_table(found))
    missed = [fault.name for fault, outcome in found if outcome.passed]
    console.print(f"MISSED: {', '.join(missed)}" if missed else f"all {len(found)} faults are found")
    return not missed


def _describe(experiment: Experiment, console: Console) -> None:
    """What the reduced model and its data are like."""
    config = experiment.config
    model, router = config.model, config.model.moe.router
    console.print(
        f"reduced {config.name}: layers {model.layer_kinds()}, hidden {model.hidden}, "
        f"heads {model.num_heads}/{model.num_kv_heads}, experts {router.num_experts}, topk {router.topk}, "
        f"tied {model.tied}, aux_loss {router.aux_loss}, {config.train.global_batch} windows of {config.data.window} tokens a step",
        soft_wrap=True,
        highlight=False,
    )
    loads = load_by_layer(Reference.of(experiment, torch.float64).routings)
    for layer, counts in loads.items():
        console.print(f"tokens per expert in expert layer {layer}: {counts}", soft_wrap=True, highlight=False)


def _split(layouts: Sequence[str], overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell layouts from overrides that were written behind them: an axis is never the name of a setting."""
    is_layout = [text.replace(",", " ").split("=")[0].strip() in AXES for text in layouts]
    chosen = [text for text, yes in zip(layouts, is_layout, strict=True) if yes]
    return chosen, [*overrides, *(text for text, yes in zip(layouts, is_layout, strict=True) if not yes)]


if __name__ == "__main__":
    sys.exit(main())
