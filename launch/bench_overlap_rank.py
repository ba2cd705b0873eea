"""One rank of the ladder of overlap, in a process of its own.

    python -m isozyme.launch.bench_overlap_rank '{"shapes": […], "routings": […], "ladder": […], …}'

Rank 0 writes the rows to the path that it was given.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from isozyme.core.config import RunConfig
from isozyme.launch.bench_agreement import disagreement, relative_errors
from isozyme.launch.bench_layer import Row
from isozyme.launch.bench_measure import Timing, free, time_interleaved
from isozyme.launch.bench_model import fill
from isozyme.launch.bench_overlap import Order
from isozyme.launch.bench_problem import Outcome
from isozyme.launch.bench_routing import choose_ids
from isozyme.launch.bench_shapes import Shape
from isozyme.launch.cli import report
from isozyme.launch.environment import ALONE, RankEnvironment, detect, die_with_parent, threads_per_rank
from isozyme.launch.requirements import Machine, check
from isozyme.launch.start import join
from isozyme.moe.layer import MoELayer
from isozyme.moe.types import Routing
from isozyme.parallel.grad_buffer import GradientBuffer
from isozyme.parallel.process_groups import ProcessGroups


def main(argv: Sequence[str]) -> int:
    """Be the rank that the environment says; returns the exit code."""
    try:
        order = Order(**json.loads(argv[0]))
        place = detect(os.environ) or ALONE
        die_with_parent(os.environ)
        rows = measure(order, place)
    except Exception as error:
        return report(error)
    if place.rank == 0:
        Path(order.result).write_text(json.dumps(rows))
    return 0


def measure(order: Order, place: RankEnvironment) -> list[Row]:
    """Join the other ranks and measure every case; all of them call it together."""
    shapes = [Shape(**each) for each in order.shapes]
    config = order.config(shapes[0], ())
    choice = check(
        config, Machine.here(), world_size=place.world_size, local_world_size=place.local_world_size
    )
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(place.local_world_size))
    device = torch.device(f"cuda:{place.local_rank}" if choice.device == "cuda" else "cpu")
    rows = []
    with join(config, place, device) as groups:
        for shape in shapes:
            layers = [
                _Rung(order.name(settings), order.config(shape, settings), groups, device, choice.dtype)
                for settings in order.rungs()
            ]
            for routing in order.routings:
                rows += _measure_case(order, shape, routing, layers, groups, device)
            layers.clear()
            free(device)
    return rows


class _Rung:
    """One layer with its gradient buffer."""

    def __init__(
        self, name: str, config: RunConfig, groups: ProcessGroups, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.name, model = name, config.model
        self.layer = MoELayer(
            model.moe,
            name="moe",
            hidden=model.hidden,
            groups=groups,
            seed=None,
            init_std=model.hidden**-0.5,
            output_std=model.moe.ffn**-0.5,
            precision=config.precision,
            device=device,
            dtype=dtype,
        )
        fill(self.layer, groups, config.seed)
        self.buffer = GradientBuffer(self.layer.parameters(), groups)

    def step(self, given: _Given) -> Outcome:
        """Forward, backward and reduction; nothing is copied."""
        self.buffer.zero()
        self.buffer.expect(1)
        output = self.layer(given.tokens, given.valid, given.routing)
        torch.autograd.backward(output.tokens, given.upstream)
        self.buffer.reduce()
        d_tokens, given.tokens.grad = given.tokens.grad, None
        assert d_tokens is not None
        main = [group.data for group in self.buffer.flat]
        return {"out": [output.tokens.detach()], "d_tokens": [d_tokens], "main_grad": main}


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What every rung gets, different on every rank."""

    tokens: Tensor
    valid: Tensor
    routing: Routing
    upstream: Tensor

    @staticmethod
    def draw(shape: Shape, routing: str, rank: int, device: torch.device, dtype: torch.dtype) -> _Given:
        ids = choose_ids(
            routing, tokens=shape.tokens, num_experts=shape.num_experts, topk=shape.topk, seed=rank
        ).to(device)
        draw = torch.Generator(device).manual_seed(1000 + rank)
        tokens, upstream = (
            torch.empty(1, shape.tokens, shape.hidden, device=device, dtype=dtype).normal_(generator=draw)
            for _ in range(2)
        )
        replayed = Routing(
            topk_ids=ids,
            topk_probs=torch.zeros(ids.shape, device=device),  # the router weighs anew
            kept=torch.ones_like(ids, dtype=torch.bool),
            num_experts=shape.num_experts,
        )
        return _Given(
            tokens=tokens.requires_grad_(),
            valid=torch.ones(1, shape.tokens, dtype=torch.bool, device=device),
            routing=replayed,
            upstream=upstream,
        )


def _measure_case(
    order: Order,
    shape: Shape,
    routing: str,
    rungs: Sequence[_Rung],
    groups: ProcessGroups,
    device: torch.device,
) -> list[Row]:
    """Hold every rung to the first, then time those that agree on all ranks, in turns."""
    dtype = rungs[0].layer.router.weight.dtype
    given = _Given.draw(shape, routing, groups.world.rank, device, dtype)
    rows: list[Row] = []
    reference: Outcome = {}
    for rung in rungs:
        rung.step(given)
        found = rung.step(given)
        if not reference:
            reference = {name: [each.clone() for each in tensors] for name, tensors in found.items()}
        errors = relative_errors(found, reference)
        worst: dict[str, float] = {
            name: max(each[name] for each in groups.world.all_gather_object(errors)) for name in errors
        }
        wrong = disagreement(worst, order.precision)  # type: ignore[arg-type]
        status: Row = {"status": "ok"} if wrong is None else {"status": "FAILED", "reason": wrong}
        more: Row = {"worst_error": max(worst.values()), "choices": rung.layer.choices}
        rows.append(order.row(shape, routing, name=rung.name, **status, **more))
    steps = {
        number: partial(rung.step, given)
        for number, (rung, row) in enumerate(zip(rungs, rows, strict=True))
        if row["status"] == "ok"
    }
    for number, timing in time_interleaved(steps, device, rounds=order.rounds, repeats=order.repeats).items():
        rows[number] |= _times(timing, shape)
    return rows


def _times(timing: Timing | str, shape: Shape) -> Row:
    if isinstance(timing, str):
        return {"status": "FAILED", "reason": f"while it was timed: {timing}"}
    seconds = timing.median / 1000
    return {
        "ms": timing.median,
        "ms_low": timing.low,
        "ms_high": timing.high,
        "samples": timing.samples,
        "tflops": shape.flops / seconds / 1e12,
        "tokens_per_s": shape.tokens / seconds,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
