"""The command line of `isozyme bench`: one parser a kind of benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from isozyme.core.errors import ConfigError, did_you_mean
from isozyme.launch.bench_peers import PEERS
from isozyme.launch.bench_rank import PEERS as TRAIN_PEERS
from isozyme.launch.bench_shapes import SHAPES
from isozyme.launch.bench_workload import WORKLOADS

Parser = argparse.ArgumentParser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the arguments after `isozyme bench`; `kind` is the benchmark, `argv` what was given.

    Raises:
        ConfigError: if the kind is unknown.
    """
    top = Parser(
        prog="isozyme bench",
        description="Measure layers and training steps, and say what was measured how.",
        epilog="isozyme bench KIND --help says more.",
    )
    described = ", ".join(f"{name} ({about})" for name, (about, _) in KINDS.items())
    top.add_argument("kind", metavar="KIND", help=described)
    kind = top.parse_args(list(argv[:1])).kind
    if kind not in KINDS:
        raise ConfigError(f"unknown benchmark: isozyme bench {kind}. {did_you_mean(kind, KINDS)}")
    about, add = KINDS[kind]
    parser = Parser(prog=f"isozyme bench {kind}", description=about)
    add(parser)
    found = parser.parse_intermixed_args(list(argv[1:]))
    found.kind, found.argv = kind, list(argv)
    return found


def _add_layer(to: Parser) -> None:
    _add_case(to, shapes=["genomic-1b"], routings=["balanced"])
    to.add_argument("--backends", type=_names, help="te@fp8_current, or te for each of --precisions")
    to.add_argument("--precisions", type=_names, help="default: bf16 on a GPU, fp32 on a CPU")
    to.add_argument("--peers", type=_names, default=[], help=f"of {', '.join(PEERS)}")


def _add_ablation(to: Parser) -> None:
    _add_case(to, shapes=list(SHAPES), routings=["balanced", "zipf:1.2", "hot:0.5", "half-empty"])
    to.add_argument("--low", default="fp8_current", help="precision of the last rung, or none")
    to.add_argument("--gpus", type=int, help="ranks of the last series, all GPUs by default")
    to.add_argument(
        "--overlap",
        nargs="+",
        default=["model.moe.delay_wgrad=true"],
        metavar="key=value",
        help="settings that overlap exchange and GEMMs, added one by one over all GPUs (%(default)s)",
    )
    to.add_argument(
        "--base", nargs="+", default=[], metavar="key=value", help="settings of every rung of that series"
    )


def _add_case(to: Parser, shapes: Sequence[str], routings: Sequence[str]) -> None:
    named = ", ".join(SHAPES)
    to.add_argument(
        "--shape", nargs="+", default=shapes, help=f"{named}, or h=64,f=96,E=4,k=2 (default: %(default)s)"
    )
    to.add_argument(
        "--routing",
        nargs="+",
        default=routings,
        help="balanced random zipf:1.2 hot:0.5 half-empty (default: %(default)s)",
    )
    to.add_argument("--tokens", type=int, help="tokens a step; the shape's own by default")
    to.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    to.add_argument("--rounds", type=int, default=3, help="turns of each contender (A B C, C B A, …)")
    _add_common(to, repeats=5)


def _add_train(to: Parser) -> None:
    to.add_argument("workload", help=f"{', '.join(WORKLOADS)}, a preset, or a recipe")
    to.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the run")
    to.add_argument(
        "--backends",
        type=_names,
        default=["auto"],
        help="as for layer; auto is the product's; auto+optim.sharded=true has a setting of its own",
    )
    to.add_argument(
        "--ladder",
        nargs="+",
        default=[],
        metavar="key=value",
        help="run the first backend again with each of these added to those before it",
    )
    to.add_argument("--precisions", type=_names, default=["bf16"])
    to.add_argument("--peers", type=_names, default=[], help=f"of {', '.join(TRAIN_PEERS)}")
    to.add_argument("--layers", type=int)
    to.add_argument("--tokens-per-gpu", type=int)
    to.add_argument("--gpus", type=int, help="ranks to start; all GPUs by default")
    to.add_argument("--layout", help='such as "dp=2 ep=1"; by default dp and ep over all GPUs')
    to.add_argument("--warm-up", type=int, default=3)
    to.add_argument("--limit-s", type=float, default=300.0, help="give a contender up (under torchrun)")
    _add_common(to, repeats=10)


def _add_layouts(to: Parser) -> None:
    to.add_argument("recipe", help="what is trained")
    to.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of all runs")
    to.add_argument(
        "--layouts",
        nargs="+",
        required=True,
        help='such as "dp=1" "tp=2" "cp=2 model.attention.context=ring"; the first is the reference',
    )
    to.add_argument("--tolerance", type=float, default=0.02, help="largest relative difference of a loss")
    _add_common(to, repeats=20)


def _add_common(to: Parser, repeats: int) -> None:
    to.add_argument("--repeats", "--steps", type=int, default=repeats, help=f"timed steps ({repeats})")
    to.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the JSON (runs/bench)")
    to.add_argument("--name", help="name of the JSON file, without its suffix")


def _add_report(to: Parser) -> None:
    to.add_argument("files", nargs="+", type=Path, metavar="JSON")
    to.add_argument("--out", type=Path, help="file to write; the terminal if left out")
    to.add_argument(
        "--auto-table",
        type=Path,
        metavar="JSON",
        help="write instead the times by which experts=auto chooses (a file of moe/experts/measured_on)",
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


KINDS: Mapping[str, tuple[str, Callable[[Parser], None]]] = MappingProxyType(
    {
        "layer": ("one layer, forward and backward, beside other implementations", _add_layer),
        "train": ("whole training steps on all GPUs, beside Hugging Face with FSDP2", _add_train),
        "layouts": ("the same training steps at several layouts, compared", _add_layouts),
        "ablation": ("what each part of a layer brings", _add_ablation),
        "report": ("JSON files merged into markdown tables", _add_report),
    }
)
"""Every kind of benchmark, what it is, and its arguments."""
