"""One rank of one contender of a training benchmark, in a process of its own.

    python -m isozyme.launch.bench_rank '{"recipe": …, "overrides": […], "contender": …, …}'

It writes what it found beside the path it was given, one file a rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from isozyme.core.errors import BackendError
from isozyme.launch.bench_ceilings import gemm_tflops
from isozyme.launch.bench_measure import free, reason_of
from isozyme.launch.bench_steps import Steps, fsdp2_steps, our_steps, peak_memory, time_steps
from isozyme.launch.bench_workload import Workload, peak_flops
from isozyme.launch.cli import report
from isozyme.launch.environment import ALONE, RankEnvironment, detect, die_with_parent, threads_per_rank
from isozyme.launch.requirements import Choice, Machine, check
from isozyme.launch.start import join
from isozyme.models.count import training_flops_per_token
from isozyme.parallel.distributed import torch_world

PEERS: Mapping[str, str] = MappingProxyType({"hf-eager-fsdp2": "eager", "hf-grouped_mm-fsdp2": "grouped_mm"})
"""Peers by name, and the implementation of experts that they use."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What one process is asked to do."""

    recipe: str
    overrides: Sequence[str]
    contender: str
    """A backend of the registry, or one of `PEERS`."""
    routing: str | None = None
    """What our routers are made to choose (`isozyme.launch.bench_routing`); None for their own choice."""
    warm_up: int
    steps: int
    result: str
    """Path of the result, without the rank."""

    def path(self, rank: int) -> Path:
        """Where a rank writes."""
        return Path(f"{self.result}.rank{rank}.json")

    def argument(self) -> str:
        """The command-line argument that says it all."""
        return json.dumps(asdict(self))


def main(argv: Sequence[str]) -> int:
    """Be the rank that the environment says; returns the exit code."""
    order = Order(**json.loads(argv[0]))
    place = ALONE
    try:
        place = detect(os.environ) or ALONE
        die_with_parent(os.environ)
        found = measure(order, place)
    except BackendError as error:
        found = {"status": "unavailable", "reason": reason_of(error)}
    except Exception as error:
        order.path(place.rank).write_text(json.dumps({"status": "FAILED", "reason": reason_of(error)}))
        return report(error)
    order.path(place.rank).write_text(json.dumps(found))
    return 0


def measure(order: Order, place: RankEnvironment) -> dict[str, Any]:
    """Join the others, build, run the steps, and say how fast they were.

    Raises:
        BackendError: if the contender cannot run here.
    """
    config = Workload(recipe=order.recipe, overrides=tuple(order.overrides)).config()
    choice = check(
        config, Machine.here(), world_size=place.world_size, local_world_size=place.local_world_size
    )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(place.local_world_size))
    device = torch.device(f"cuda:{place.local_rank}" if choice.device == "cuda" else "cpu")
    if order.contender not in PEERS:
        with join(config, place, device) as groups:
            steps = our_steps(config, groups, device, choice.dtype, routing=order.routing)
            return _measure(order, place, device, steps)
    with torch_world(
        rank=place.rank,
        world_size=place.world_size,
        init_method=_meeting_point(order, place),
        device=device,
        timeout=timedelta(seconds=config.train.timeout_s),
    ):
        return _measure(order, place, device, _peer_steps(order, choice, device, place))


def _peer_steps(order: Order, choice: Choice, device: torch.device, place: RankEnvironment) -> Steps:
    config = Workload(recipe=order.recipe, overrides=tuple(order.overrides)).config()
    return fsdp2_steps(
        config, PEERS[order.contender], device, choice.dtype, rank=place.rank, world_size=place.world_size
    )


def _meeting_point(order: Order, place: RankEnvironment) -> str:
    """A rank that nobody started meets itself in a file."""
    if place is ALONE:
        return f"file://{Path(order.result).absolute()}.meet"
    return f"tcp://{place.master_addr}:{place.master_port}"


def _measure(order: Order, place: RankEnvironment, device: torch.device, steps: Steps) -> dict[str, Any]:
    config = Workload(recipe=order.recipe, overrides=tuple(order.overrides)).config()
    with closing(steps), peak_memory(device) as peak:
        timed = time_steps(steps, config, device, warm_up=order.warm_up, repeats=order.steps)
        peak_bytes = peak()
    choices = dict(steps.choices)
    del steps
    free(device)
    tokens = config.train.global_batch * config.data.window // place.world_size
    per_token = training_flops_per_token(config.model, config.data.window)
    rate = tokens / timed.median_s
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    limit, measured = peak_flops(gpu), gemm_tflops(device)
    return {
        "status": "ok",
        "tokens_per_gpu": tokens,
        "tokens_per_s_per_gpu": rate,
        "tflops_per_gpu": rate * per_token / 1e12,
        "mfu": None if limit is None else rate * per_token / limit,
        "share_of_measured_gemm": rate * per_token / (measured * 1e12),
        "gemm_tflops": measured,
        "flops_per_token": per_token,
        "step_ms": 1000 * timed.median_s,
        "step_ms_low": min(timed.milliseconds),
        "step_ms_high": max(timed.milliseconds),
        "steps": len(timed.milliseconds),
        "peak_bytes": peak_bytes,
        "first_loss": timed.first_loss,
        "last_loss": timed.last_loss,
        "choices": choices,
        "layout": str(config.layout),
        "layers": config.model.num_layers,
        "window": config.data.window,
        "precision": config.precision,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
