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

    isozyme verify --all [RECIPE] [--workers N]

runs a fixed list of layouts and kinds of models (`isozyme.launch.verify_families`): each axis alone, each
pair, all together, and more. Without a recipe it takes a model that has everything.

    isozyme verify RECIPE --faults

runs faults made on purpose (`isozyme.launch.verify_faults`) and succeeds if every one of them is found.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from rich.console import Console

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout
from isozyme.launch.cli import parse_layout
from isozyme.launch.compose import compose
from isozyme.launch.factory import load_factory
from isozyme.launch.verify_all import Subject, families_of, verify_families
from isozyme.launch.verify_families import DEFAULT_MODEL, DEFAULT_RECIPE
from isozyme.launch.verify_judge import Reference
from isozyme.launch.verify_plan import BOTH, default_layouts, prepare, verify
from isozyme.launch.verify_report import fault_table, print_outcomes, print_verdicts
from isozyme.launch.verify_routing import load_by_layer
from isozyme.launch.verify_run import Experiment
from isozyme.launch.verify_trials import find_faults
from isozyme.models.decoder import build_model
from isozyme.models.types import ModelFactory

DTYPES = {"fp64": (torch.float64,), "fp32": (torch.float32,), "both": BOTH}
WIDTH = 140
"""Columns of what is written to a file or a pipe."""
AXES = tuple(field.name for field in fields(Layout))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="name of a recipe, or path of a YAML file (optional with --all)",
    )
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
    parser.add_argument(
        "--all", action="store_true", help="verify the fixed list of layouts and kinds of models"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes for --all (default 1)")
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
    recipe: str | None = arguments.recipe
    if recipe is not None and "=" in recipe:  # an override: the recipe was left out
        overrides = [recipe, *overrides]
        recipe = None
    factory = build_model if arguments.model is None else load_factory(arguments.model)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if arguments.all:
        return 0 if _all(recipe, overrides, arguments, factory, console) else 1
    if recipe is None:
        raise ConfigError(
            "name a recipe to verify: for instance isozyme verify L0_sanity. Only --all does without."
        )
    config = compose(recipe, overrides)
    if arguments.seed is not None:
        config = replace(config, seed=arguments.seed)
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


def _all(
    recipe: str | None,
    overrides: Sequence[str],
    arguments: argparse.Namespace,
    factory: ModelFactory,
    console: Console,
) -> bool:
    if arguments.layouts or arguments.dispatchers:
        raise ConfigError(
            "--all brings its own layouts and dispatchers: leave --layouts and --dispatchers out."
        )
    subject = Subject(
        recipe=recipe or DEFAULT_RECIPE,
        overrides=(*(() if recipe else DEFAULT_MODEL), *overrides),
        seed=arguments.seed,
        factory=factory,
    )
    families = families_of(subject)
    with console.status("running") as status:
        verdicts = verify_families(
            subject,
            families,
            dtypes=DTYPES[arguments.dtype],
            workers=arguments.workers,
            progress=lambda family: status.update(f"{family.name} is done"),
        )
    return print_verdicts(verdicts, console)


def _faults(config: RunConfig, factory: ModelFactory, console: Console) -> bool:
    trials = find_faults(config, factory)
    console.print(fault_table(trials))
    missed = [trial.fault.name for trial in trials if trial.missed]
    made = sum(trial.outcome is not None for trial in trials)
    rest = f"; {len(trials) - made} cannot be made with this recipe" if made < len(trials) else ""
    console.print(f"MISSED: {', '.join(missed)}" if missed else f"all {made} faults are found{rest}")
    return not missed


def _describe(experiment: Experiment, console: Console) -> None:
    """What the reduced model and its data are like."""
    config = experiment.config
    model, router = config.model, config.model.moe.router
    facts = {
        "layers": model.layer_kinds(),
        "hidden": model.hidden,
        "heads": f"{model.num_heads}/{model.num_kv_heads}",
        "experts": router.num_experts,
        "topk": router.topk,
        "tied": model.tied,
        "aux_loss": router.aux_loss,
        "windows a step": config.train.global_batch,
        "tokens a window": config.data.window,
    }
    described = ", ".join(f"{name} {value}" for name, value in facts.items())
    console.print(f"reduced {config.name}: {described}", soft_wrap=True, highlight=False)
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
