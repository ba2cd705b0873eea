"""`isozyme bench ablation`: rungs on one device, and settings that overlap something over several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isozyme.core.errors import ConfigError
from isozyme.launch import bench_overlap_rank
from isozyme.launch.bench_ablation import CHAINED, LEFT_OUT, bench_ablation, with_gains
from isozyme.launch.bench_layer import Effort
from isozyme.launch.bench_overlap import Order, overlap_rows
from isozyme.launch.bench_overlap_rank import measure
from isozyme.launch.bench_problem import Outcome, Problem
from isozyme.launch.bench_shapes import shape
from isozyme.launch.environment import ALONE


@pytest.mark.parametrize("routing", ["zipf:1.2", "half-empty"])
def test_every_rung_of_the_ablation_agrees_and_is_timed(routing: str) -> None:
    size = shape("h=32,f=48,E=6,k=2", tokens=40)
    problem = Problem.draw(size, routing, device=torch.device("cpu"), dtype=torch.float32)
    rows = bench_ablation(problem, "fp8_current", Effort(rounds=1, repeats=1, warm_up=1), lambda _text: None)
    by_table = {name: [row for row in rows if row["table"] == name] for name in (CHAINED, LEFT_OUT)}
    assert [row["status"] for row in by_table[CHAINED]] == ["ok"] * 6 + ["unavailable"]
    assert [row["status"] for row in by_table[LEFT_OUT]] == ["ok"] * 5
    loop, *_, swiglu, node, router = (row["saved_bytes_per_token"] for row in by_table[CHAINED][:6])
    assert loop > 1.3 * swiglu > 1.3 * 1.3 * node > 1.3 * 1.3 * router
    assert {"d_router", "d_tokens", "d_down"} <= set(by_table[CHAINED][0]["errors"])


def test_gains_are_over_the_rung_before_or_over_all_parts() -> None:
    case = {"shape": "s", "tokens": 8, "routing": "random"}
    rows = [
        {**case, "table": table, **({} if ms is None else {"ms": ms})}
        for table, times in ((CHAINED, (8.0, None, 4.0, 1.0)), (LEFT_OUT, (2.0, 4.0, 8.0)))
        for ms in times
    ]
    assert [row.get("gain") for row in with_gains(rows)] == [None, None, 2.0, 4.0, None, 0.5, 0.25]


def order(gpus: int, *ladder: str, device: str = "cpu", precision: str = "fp32") -> Order:
    return Order.of(
        [shape("h=32,f=48,E=6,k=2", tokens=40)],
        ["hot:0.5", "half-empty"],
        ladder,
        gpus=gpus,
        device=torch.device(device),
        precision=precision,
        effort=Effort(rounds=1, repeats=1),
    )


def test_overlap_does_not_apply_to_one_rank_and_an_unknown_setting_is_refused() -> None:
    rows = overlap_rows(order(1), lambda _text: None)
    assert [(row["routing"], row["status"]) for row in rows] == [
        ("hot:0.5", "unavailable"), ("half-empty", "unavailable")
    ]  # fmt: skip
    assert "ep=1" in rows[0]["reason"]
    with pytest.raises(ConfigError, match="overlap_all"):
        order(2, "model.moe.overlap_all=true")
    shared = replace(order(2), base=["model.moe.shared_ffn=16"])
    assert shared.config(shared.cases()[0][0], ()).model.moe.shared_ffn == 16
    assert shared.name(["a.b=1"]) == "ep=2, model.moe.shared_ffn=16 + a.b=1"


def test_rungs_of_overlap_are_held_to_the_first_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, in this process: what the ranks do."""
    asked = order(1, "optim.overlap_reduce=true")
    rows = measure(asked, ALONE)
    assert [row["name"] for row in rows[:2]] == ["ep=1", "ep=1 + optim.overlap_reduce=true"]
    assert all(row["status"] == "ok" and row["ms"] > 0 for row in rows)
    forward = bench_overlap_rank._Rung.step

    def faulty(self: bench_overlap_rank._Rung, given: bench_overlap_rank._Given) -> Outcome:
        found = forward(self, given)
        wrong = self.name != "ep=1" and given.routing.topk_ids[0, 0] >= 0
        return {**found, "main_grad": [2 * each for each in found["main_grad"]]} if wrong else found

    monkeypatch.setattr(bench_overlap_rank._Rung, "step", faulty)
    plain, doubled = measure(asked, ALONE)[:2]
    assert (plain["status"], doubled["status"]) == ("ok", "FAILED")
    assert "main_grad" in doubled["reason"]


@pytest.mark.slow
def test_the_ladder_of_overlap_runs_over_two_ranks() -> None:
    rows = overlap_rows(order(2, "optim.overlap_reduce=true"), lambda _text: None)
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert all("alltoall" in row["choices"]["dispatcher"] for row in rows)


def test_a_router_of_a_rung_chooses_what_the_problem_says() -> None:
    from isozyme.launch.bench_rungs import _route

    size = shape("h=32,f=48,E=6,k=2", tokens=40)
    problem = Problem.draw(size, "hot:0.5", device=torch.device("cpu"), dtype=torch.float32)
    for fused in (False, True):
        ids, _ = _route(problem, fused)
        assert torch.equal(ids.sort(dim=1).values, problem.topk_ids.sort(dim=1).values)


def test_an_unknown_precision_of_the_last_rung_is_refused() -> None:
    problem = Problem.draw(
        shape("h=8,f=8,E=2,k=1", tokens=4), "random", device=torch.device("cpu"), dtype=torch.float32
    )
    with pytest.raises(ConfigError, match="--low=fp9"):
        bench_ablation(problem, "fp9", Effort())


@pytest.mark.gpu(2)
def test_the_ladder_of_overlap_runs_over_two_gpus() -> None:
    asked = order(2, "model.moe.delay_wgrad=true", device="cuda", precision="bf16")
    rows = overlap_rows(asked, lambda _text: None)
    assert {row.get("reason") for row in rows} == {None}
    assert [row["status"] for row in rows] == ["ok"] * 4


@pytest.mark.gpu
def test_every_rung_agrees_on_a_gpu_with_every_routing() -> None:
    size = shape("h=256,f=512,E=8,k=2", tokens=1024)
    device = torch.device("cuda", 0)
    for routing in ("balanced", "zipf:1.2", "hot:0.5", "half-empty"):
        problem = Problem.draw(size, routing, device=device, dtype=torch.bfloat16)
        rows = bench_ablation(problem, None, Effort(rounds=1, repeats=1, warm_up=1), lambda _text: None)
        assert {row["name"]: row.get("reason") for row in rows if row["status"] != "ok"} == {}
