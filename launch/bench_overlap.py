"""What overlapping the exchange with GEMMs brings: the layer with its experts spread over all GPUs.

One layer of the package, through router, dispatch, experts, combine and gradient buffer, as training runs it.
Settings that overlap something are added one by one; every rung must give the first one's results.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isozyme.core.config import RunConfig
from isozyme.core.topology import Topology
from isozyme.launch.bench_layer import Effort, Row, Say
from isozyme.launch.bench_shapes import Shape
from isozyme.launch.compose import compose
from isozyme.launch.local import run_ranks

OVERLAP = "spread over all GPUs, overlapping more and more"


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the ranks are asked to do."""

    shapes: Sequence[Mapping[str, Any]]
    routings: Sequence[str]
    ladder: Sequence[str]
    """Settings `key=value`, each added to those before it."""
    base: Sequence[str]
    """Settings of every rung."""
    gpus: int
    device: str
    precision: str
    rounds: int
    repeats: int
    result: str
    """Path of the rows."""

    @staticmethod
    def of(
        shapes: Sequence[Shape],
        routings: Sequence[str],
        ladder: Sequence[str],
        *,
        base: Sequence[str] = (),
        gpus: int,
        device: torch.device,
        precision: str,
        effort: Effort,
    ) -> Order:
        """The order for some layers.

        Args:
            shapes: the layers; `tokens` are those of each GPU.
            routings: see `isozyme.launch.bench_routing`; each GPU draws its own.
            ladder: settings that overlap something.
            base: settings of every rung, such as a shared expert.
            gpus: the number of ranks, over which the experts are spread.
            device: cpu or cuda.
            precision: of the layer.
            effort: how long to measure.

        Raises:
            ConfigError: if a setting is unknown or does not fit.
        """
        order = Order(
            shapes=[asdict(each) for each in shapes],
            routings=list(routings),
            ladder=list(ladder),
            base=list(base),
            gpus=gpus,
            device=device.type,
            precision=precision,
            rounds=effort.rounds,
            repeats=effort.repeats,
            result="",
        )
        for each in shapes:
            for settings in order.rungs():
                order.config(each, settings)
        return order

    def cases(self) -> list[tuple[Shape, str]]:
        """Every shape with every routing."""
        return [(Shape(**each), routing) for each in self.shapes for routing in self.routings]

    def name(self, settings: Sequence[str] = ()) -> str:
        """What a rung is called."""
        return " + ".join([", ".join([f"ep={self.gpus}", *self.base]), *settings])

    def row(self, shape: Shape, routing: str, **more: Any) -> Row:
        """A row of the table."""
        return {
            "name": self.name(),
            "kind": "rung",
            "precision": self.precision,
            "shape": shape.name,
            "tokens": shape.tokens,
            "routing": routing,
            "table": OVERLAP,
            **more,
        }

    def config(self, shape: Shape, settings: Sequence[str]) -> RunConfig:
        """A run whose expert layer is the one to measure."""
        router = "model.moe.router"
        sizes = {
            "model.hidden": shape.hidden,
            "model.num_heads": 1,  # attention is not built
            "model.num_kv_heads": 1,
            "model.moe.ffn": shape.ffn,
            f"{router}.num_experts": shape.num_experts,
            f"{router}.topk": shape.topk,
            "layout.dp": self.gpus,
            "layout.ep": self.gpus,
            "train.micro_batch": 1,
            "train.global_batch": self.gpus,
            "device": self.device,
            "precision": self.precision,
        }
        given = [f"{key}={value}" for key, value in sizes.items()]
        return compose("L0_sanity", [*given, *self.base, *settings])

    def rungs(self) -> list[tuple[str, ...]]:
        """The settings of every rung, none first."""
        return [tuple(self.ladder[:count]) for count in range(len(self.ladder) + 1)]


def overlap_rows(order: Order, say: Say = print) -> list[Row]:
    """Start one process a GPU and measure the ladder in each case.

    Returns:
        Rows like those of the other rungs; one of status `unavailable` a case where there is one rank.
    """
    if order.gpus == 1:
        why = "one rank holds all experts (ep=1): there is no exchange to overlap"
        return [order.row(*case, status="unavailable", reason=why) for case in order.cases()]
    say(f" {OVERLAP}: {order.gpus} ranks")
    with tempfile.TemporaryDirectory(prefix="isozyme-bench-") as folder:
        path = Path(folder) / "rows.json"
        argument = json.dumps(asdict(replace(order, result=str(path))))
        topology = Topology(order.config(order.cases()[0][0], ()).layout)
        code = run_ranks([sys.executable, "-m", "isozyme.launch.bench_overlap_rank", argument], topology)
        if code == 0:
            rows: list[Row] = json.loads(path.read_text())
            return rows
    reason = f"the ranks ended with code {code} and left no result"
    return [order.row(*case, status="FAILED", reason=reason) for case in order.cases()]
