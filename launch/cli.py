"""The command `isozyme`: its subcommands, and how errors leave it (exit codes in `isozyme.launch.failures`).

    isozyme train RECIPE [key=value ...]     train; starts the ranks itself unless a launcher did
        --model package.module:factory       … a model of your own (also for eval and verify)
    isozyme eval WEIGHTS FASTA [key=value …] bits per base of a trained model on a genome
    isozyme config RECIPE [key=value ...]    print the composed configuration
    isozyme topology "dp=2 ep=2"             print which rank has which coordinates
    isozyme verify ...                       hold a layout to one rank, value by value
    isozyme bench KIND ...                   measure layers and training steps, and compare them

Subcommands import what they need when they run, so that `--help` and a configuration error come at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from isozyme import __version__
from isozyme.core.errors import ConfigError, did_you_mean
from isozyme.core.topology import Layout, Topology

_MODULES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "verify": ("isozyme.launch.verify", "hold a layout to one rank, value by value"),
        "bench": ("isozyme.launch.bench", "measure layers and training steps, and compare them"),
    }
)
"""Commands that parse their own arguments: the module whose `main(argv)` runs, and one line of help."""

_MODEL = "a model of your own: its factory(config, groups, chunk, device, dtype)"
_OVERRIDES = "dotted.key=value, the value in YAML (model.moe.router.topk=1); later ones win"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments after the program's name; those of this process by default.

    Returns:
        The exit code. An error is printed as one readable block on stderr, without a traceback if isozyme
        raised it on purpose (ISOZYME_TRACEBACK=1 shows it all the same).
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] and given[0] in _MODULES:
        module, rest = _MODULES[given[0]][0], given[1:]
        return _guarded(lambda: _load(module).main(rest))
    arguments = _parsed(given)
    return _guarded(lambda: arguments.run(arguments))


def _parsed(given: Sequence[str]) -> argparse.Namespace:
    """The arguments; overrides may stand before and after options."""
    top = parser()
    arguments, rest = top.parse_known_args(given)
    if rest and (any(word.startswith("-") for word in rest) or not hasattr(arguments, "overrides")):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _guarded(command: Callable[[], int]) -> int:
    """Run a command; whatever it raises becomes a block on stderr and an exit code."""
    try:
        return command()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return report(error)


def parser() -> argparse.ArgumentParser:
    """The argument parser with every subcommand."""
    top = argparse.ArgumentParser(
        prog="isozyme", description="Mixture-of-experts models of biological sequences, at every layout."
    )
    top.add_argument("--version", action="version", version=f"isozyme {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = commands.add_parser("train", help="train a recipe; starts the ranks itself unless a launcher did")
    train.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or path of a YAML file")
    train.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
    train.add_argument("--model", metavar="MODULE:FACTORY", help=_MODEL)
    train.set_defaults(run=_train)
    evaluate = commands.add_parser(
        "eval", help="bits per base of trained weights on a genome, each base once"
    )
    evaluate.add_argument("weights", metavar="WEIGHTS", help="weights.safetensors of a run")
    evaluate.add_argument("fasta", metavar="FASTA", help="genome to score, plain or gzip")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
    evaluate.add_argument("--model", metavar="MODULE:FACTORY", help=_MODEL)
    evaluate.set_defaults(run=_evaluate)
    config = commands.add_parser("config", help="print the composed configuration of a recipe")
    config.add_argument("recipe", metavar="RECIPE")
    config.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES)
    config.set_defaults(run=_config)
    topology = commands.add_parser("topology", help="print the coordinates of every rank of a layout")
    topology.add_argument("layout", nargs="+", metavar="axis=size", help='for instance "dp=4 ep=2"')
    topology.add_argument("--limit", type=int, default=64, help="print at most this many ranks (default 64)")
    topology.set_defaults(run=_topology)
    for name, (_, summary) in _MODULES.items():
        commands.add_parser(name, help=summary)  # for --help alone: `main` hands these on before parsing
    return top


def _load(module: str) -> Any:
    """Import a module that needs torch; Ctrl-C ends the process, since torch cannot be half imported."""
    if threading.current_thread() is not threading.main_thread():
        return importlib.import_module(module)
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, before)


def _train(arguments: argparse.Namespace) -> int:
    start = _load("isozyme.launch.start")
    code: int = start.train(arguments.recipe, arguments.overrides, os.environ, arguments.model)
    return code


def _evaluate(arguments: argparse.Namespace) -> int:
    evaluate = _load("isozyme.launch.evaluate")
    given = (arguments.weights, arguments.fasta, arguments.overrides, arguments.model)
    for line in evaluate.evaluate_file(*given):
        print(line)
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from isozyme.launch.compose import compose, to_yaml

    print(to_yaml(compose(arguments.recipe, arguments.overrides)), end="")
    return 0


def _topology(arguments: argparse.Namespace) -> int:
    topology = Topology(parse_layout(" ".join(arguments.layout)))
    print(f"{topology.world_size} ranks: {topology.layout}")
    print(topology.table(arguments.limit))
    return 0


def parse_layout(text: str) -> Layout:
    """A layout as written on the command line.

    Raises:
        ConfigError: if an axis is unknown or a size is no whole number.

    >>> parse_layout("dp=4 ep=2").ep
    2
    """
    sizes: dict[str, int | str] = {}
    known = tuple(field.name for field in fields(Layout))
    for part in text.replace(",", " ").split():
        axis, _, size = part.partition("=")
        if axis not in known:
            raise ConfigError(f"unknown axis: {part}. {did_you_mean(axis, known)} For instance dp=2 ep=2.")
        if axis != "order" and not size.isdigit():
            raise ConfigError(f"a parallel size must be a whole number: {part}. For instance {axis}=2.")
        sizes[axis] = size if axis == "order" else int(size)
    return Layout(**sizes)  # type: ignore[arg-type]


def report(error: BaseException) -> int:
    """Print the error, leave it where a launcher looks for it, and give the exit code."""
    if isinstance(error, KeyboardInterrupt):  # first, as it may have come while torch was imported
        print("isozyme: interrupted", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    from isozyme.launch import failures
    from isozyme.launch.environment import ERROR_FOLDER

    env: Mapping[str, str] = os.environ
    rank = int(env["RANK"]) if env.get("RANK", "").isdigit() else 0
    failure = failures.failure_of(error, rank, env)
    if "RANK" in env:
        failures.record(failure, error, env)
    if ERROR_FOLDER not in env:
        world = int(env["WORLD_SIZE"]) if env.get("WORLD_SIZE", "").isdigit() else 1
        print(failures.block(failure, world), file=sys.stderr, flush=True)
    return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
