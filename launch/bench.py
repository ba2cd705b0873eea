"""`isozyme bench`: a layer, training steps, an ablation, layouts, and reports of what they found.

    isozyme bench layer --shape mixtral-8x7b --routing balanced zipf:1.2 --peers hf-eager,hf-grouped_mm
    isozyme bench train mixtral8x7b-4L --backends auto,te --peers hf-grouped_mm-fsdp2
    isozyme bench ablation --shape genomic-1b
    isozyme bench layouts genome_small --layouts "dp=1" "tp=2" "cp=2" "pp=2" "dp=2 ep=2"
    isozyme bench report runs/bench/*.json

Each writes a JSON file as it goes, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from isozyme.core.errors import ConfigError
from isozyme.launch.bench_ablation import bench_ablation, draw_picture, with_gains
from isozyme.launch.bench_arguments import parse
from isozyme.launch.bench_ceilings import copy_tbytes, gemm_tflops
from isozyme.launch.bench_contenders import default_backends, default_precision, our_contenders
from isozyme.launch.bench_document import new_document, read_document, write_document
from isozyme.launch.bench_layer import Effort, bench_cases, case_of
from isozyme.launch.bench_layouts import WARM_UP, bench_layouts, layout_runs
from isozyme.launch.bench_measure import free, quick_collections
from isozyme.launch.bench_measured import measured_table, write_table
from isozyme.launch.bench_overlap import Order, overlap_rows
from isozyme.launch.bench_peers import peer_contenders
from isozyme.launch.bench_problem import Problem, RandomExpertWeights
from isozyme.launch.bench_report import markdown, terminal_tables
from isozyme.launch.bench_routing import choose_ids
from isozyme.launch.bench_shapes import shape
from isozyme.launch.bench_train import bench_train, ladder, train_contenders
from isozyme.launch.bench_workload import workload
from isozyme.launch.environment import detect

WIDTH = 180
"""Columns of tables that go to a file or a pipe."""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code, which is 1 if a contender disagreed or broke."""
    arguments = parse(argv)
    kinds = {"layer": _layer, "train": _train, "ablation": _ablation, "layouts": _layouts, "report": _report}
    with quick_collections() if arguments.kind in ("layer", "ablation") else nullcontext():
        return kinds[arguments.kind](arguments)


def _device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("a CUDA device must be there: --device=cuda, torch finds none. Use --device=cpu.")
    chosen = asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(chosen, 0) if chosen == "cuda" else torch.device(chosen)


def _start(arguments: argparse.Namespace, settings: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    document = new_document(arguments.kind, arguments.argv, settings)
    return document, arguments.out / f"{arguments.name or arguments.kind}.json"


def _ceilings(device: torch.device) -> dict[str, float]:
    found = {"gemm_tflops": gemm_tflops(device), "copy_tbytes": copy_tbytes(device)}
    free(device)
    return found


def _effort(arguments: argparse.Namespace) -> Effort:
    for name in ("rounds", "repeats"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} must be at least 1: --{name}={getattr(arguments, name)}.")
    return Effort(rounds=arguments.rounds, repeats=arguments.repeats)


def _layer(arguments: argparse.Namespace) -> int:
    device, effort = _device(arguments.device), _effort(arguments)
    shapes = [shape(text, tokens=arguments.tokens) for text in arguments.shape]
    for text in arguments.routing:
        choose_ids(text, tokens=4, num_experts=4, topk=1, seed=0)  # refuses what it cannot read
    precisions = arguments.precisions or [default_precision(device)]
    backends = arguments.backends if arguments.backends is not None else default_backends(device)
    ours = our_contenders(backends, precisions)
    contenders = [*ours, *peer_contenders(arguments.peers, default_precision(device))]
    settings = {"rounds": effort.rounds, "repeats": effort.repeats, "warm_up": effort.warm_up}
    document, path = _start(arguments, {**settings, "device": str(device)})
    document["ceilings"] = _ceilings(device)
    print(f"large GEMM {document['ceilings']['gemm_tflops']:,.1f} TFLOP/s, "
          f"copy {document['ceilings']['copy_tbytes']:.2f} TB/s", flush=True)  # fmt: skip
    for case, rows in bench_cases(shapes, arguments.routing, contenders, device, effort, _say):
        _add(document, path, [case], rows)
    print(f"written to {path}")
    return _code(document)


def _ablation(arguments: argparse.Namespace) -> int:
    device, effort = _device(arguments.device), _effort(arguments)
    shapes = [shape(text, tokens=arguments.tokens) for text in arguments.shape]
    low = None if arguments.low == "none" else arguments.low
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    order = Order.of(
        shapes,
        arguments.routing,
        arguments.overlap,
        base=arguments.base,
        gpus=arguments.gpus or (torch.cuda.device_count() if device.type == "cuda" else 1),
        device=device,
        precision=default_precision(device),
        effort=effort,
    )
    settings = {"rounds": effort.rounds, "repeats": effort.repeats, "low": low, "device": str(device)}
    document, path = _start(arguments, settings)
    document["ceilings"] = _ceilings(device)
    for size in shapes:
        weights = RandomExpertWeights(size, device=device, dtype=dtype, seed=0)
        for number, routing in enumerate(arguments.routing):
            problem = Problem.draw(size, routing, device=device, dtype=dtype, weights=weights)
            # What is compiled and how many kernels there are does not depend on the routing.
            quick = effort if number == 0 else replace(effort, warm_up=1, count_calls=False)
            case, rows = case_of(problem, _say), bench_ablation(problem, low, quick, _say)
            del problem
            free(device)
            _add(document, path, [case], rows)
        del weights
        free(device)
    _add(document, path, [], with_gains(overlap_rows(order, _say)))
    for size in shapes:
        for routing in arguments.routing:
            rows = [r for r in document["rows"] if (r["shape"], r["routing"]) == (size.name, routing)]
            picture = path.with_name(f"{path.stem}-{_word(size.name)}-{_word(routing)}.png")
            refused = draw_picture(rows, f"{size.name}, {size.tokens:,} tokens, {routing}", picture)
            print(refused or f"picture: {picture}")
    print(f"written to {path}")
    return _code(document)


def _add(document: dict[str, Any], path: Path, cases: Sequence[Any], rows: Sequence[Any]) -> None:
    """Add what was measured to the document, write it, and show it."""
    document["cases"] += cases
    document["rows"] += rows
    write_document(document, path)
    _show({**document, "rows": rows})


def _train(arguments: argparse.Namespace) -> int:
    place = detect(os.environ)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 1
    world_size = place.world_size if place is not None else arguments.gpus or gpus
    chosen = workload(
        arguments.workload,
        world_size=world_size,
        layers=arguments.layers,
        tokens_per_gpu=arguments.tokens_per_gpu,
        layout=arguments.layout,
        overrides=arguments.overrides,
    )
    contenders = train_contenders(arguments.backends, arguments.precisions, arguments.peers)
    if arguments.ladder and contenders:
        contenders = list(dict.fromkeys([*ladder(contenders[0], arguments.ladder), *contenders]))
    for contender in contenders:
        chosen.config(*contender.overrides())  # refuses a wrong setting before the first one runs
    settings = {
        "workload": arguments.workload,
        "gpus": world_size,
        "warm_up": arguments.warm_up,
        "steps": arguments.repeats,
        "overrides": list(chosen.overrides),
    }
    document, path = _start(arguments, settings)
    leader = place is None or place.rank == 0
    for row in bench_train(
        chosen,
        contenders,
        warm_up=arguments.warm_up,
        steps=arguments.repeats,
        place=place,
        limit_s=arguments.limit_s,
        say=_say if leader else _silent,
    ):
        document["rows"].append(row)
        if leader:
            write_document(document, path)
    if leader:
        _show(document)
        print(f"written to {path}")
    return _code(document)


def _layouts(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.tolerance < 1:
        raise ConfigError(f"--tolerance is a share between 0 and 1: {arguments.tolerance}. Try 0.02.")
    runs = layout_runs(arguments.recipe, arguments.layouts, arguments.overrides, arguments.repeats)
    settings = {
        "workload": arguments.recipe,
        "steps": arguments.repeats,
        "warm_up": WARM_UP,
        "tolerance": arguments.tolerance,
        "overrides": arguments.overrides,
    }
    document, path = _start(arguments, settings)
    for row in bench_layouts(arguments.recipe, runs, tolerance=arguments.tolerance, say=_say):
        document["rows"].append(row)
        write_document(document, path)
    _show(document)
    print(f"written to {path}")
    return _code(document)


def _report(arguments: argparse.Namespace) -> int:
    documents = [read_document(path) for path in arguments.files]
    if arguments.auto_table is not None:
        write_table(measured_table(documents), arguments.auto_table)
        return 0
    text = markdown(documents)
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text)
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    del text


def _word(text: str) -> str:
    """A text as part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in text)


def _show(document: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in terminal_tables(document):
        console.print(table)


def _code(document: dict[str, Any]) -> int:
    return 1 if any(row["status"] == "FAILED" for row in document["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
