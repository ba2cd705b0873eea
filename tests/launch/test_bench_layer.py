"""The layer benchmark on a CPU: who takes part, who may be timed, and what a failure looks like."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isozyme.core.errors import BackendError, ConfigError
from isozyme.launch.bench_agreement import reference_outcome, relative_errors
from isozyme.launch.bench_contenders import our_contender, our_contenders
from isozyme.launch.bench_layer import Effort, bench_cases, compare
from isozyme.launch.bench_measure import Timing, quick_collections, time_interleaved
from isozyme.launch.bench_peers import PEERS, peer_contenders
from isozyme.launch.bench_problem import Built, Contender, Problem
from isozyme.launch.bench_shapes import shape
from isozyme.moe.reference import reference_moe
from isozyme.moe.types import Routing

CPU = torch.device("cpu")
SIZE = shape("h=32,f=48,E=6,k=2", tokens=40)
QUICK = Effort(rounds=1, repeats=1, warm_up=1)


def silent(_text: str) -> None:
    """Say nothing."""


def draw(routing: str = "zipf:1.2", dtype: torch.dtype = torch.float32) -> Problem:
    return Problem.draw(SIZE, routing, device=CPU, dtype=dtype)


def changed(name: str, change: Callable[[Problem, Built], Built]) -> Contender:
    """The loop backend with a fault."""
    loop = our_contender("loop", "fp32")
    return replace(loop, name=name, build=lambda problem: change(problem, loop.build(problem)))


def test_the_reference_is_the_dense_sum_over_experts() -> None:
    problem = draw(dtype=torch.float64)
    weights = problem.weights
    routing = Routing(
        topk_ids=problem.topk_ids,
        topk_probs=problem.topk_probs,
        kept=torch.ones_like(problem.topk_ids, dtype=torch.bool),
        num_experts=SIZE.num_experts,
    )
    gate_up, down = (torch.stack(list(stack)) for stack in (weights.gate_up, weights.down))
    dense = reference_moe(problem.tokens, routing, gate_up, down)
    leaves = [problem.tokens, problem.topk_probs, *weights.gate_up, *weights.down]
    grads = torch.autograd.grad(dense, leaves, problem.upstream)
    built = our_contender("loop", "fp64").build(problem)
    errors = relative_errors(built.outcome(dense, grads), reference_outcome(problem))
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("routing", ["balanced", "half-empty", "hot:1"])
def test_every_backend_and_peer_agrees_and_is_timed(routing: str) -> None:
    ours = our_contenders(["loop", "grouped_mm", "grouped_mm_fused", "loop@fp32"], ["fp32"])
    peers = peer_contenders(["hf-eager", "hf-grouped_mm", "torchtitan-like"], "fp32")
    assert len(ours) == 3
    rows = compare(draw(routing), [*ours, *peers], QUICK, silent)
    assert {row["name"]: row.get("reason") for row in rows if row["status"] != "ok"} == {}
    assert all(row["ms"] > 0 and row["tokens_per_s"] > 0 and row["worst_error"] < 1e-5 for row in rows)


def test_a_backend_with_one_precision_of_its_own_gets_it_unasked() -> None:
    ours = our_contenders(["grouped_fp8", "grouped_mm_fused", "grouped_fp8@bf16"], ["bf16"])
    assert [(each.name, each.precision) for each in ours] == [
        ("grouped_fp8", "fp8_rowwise"),
        ("grouped_mm_fused", "bf16"),
        ("grouped_fp8", "bf16"),
    ]
    size = shape("h=64,f=96,E=4,k=2", tokens=96)
    ((_, rows),) = bench_cases([size], ["hot:0.5"], ours, torch.device("cpu"), QUICK, silent)
    eight, sixteen, refused = rows
    assert [eight["status"], sixteen["status"]] == ["ok", "ok"], rows
    assert 0.01 < eight["worst_error"] < 0.15
    assert sixteen["worst_error"] < 0.01
    assert "Set precision=fp8_rowwise" in refused["reason"]
    assert eight["saved_over_bound"] < 1.1


def test_the_fused_node_keeps_what_the_bound_allows_and_others_more() -> None:
    contenders = our_contenders(["loop", "grouped_mm_fused"], ["fp32"])
    loop, fused = compare(draw(), contenders, QUICK, silent)
    assert 0.95 < fused["saved_over_bound"] < 1.05
    assert loop["saved_over_bound"] > 1.5


def test_a_wrong_result_is_not_timed() -> None:
    def scaled(_problem: Problem, built: Built) -> Built:
        return replace(built, forward=lambda: 1.01 * built.forward())

    (row,) = compare(draw(), [changed("scaled", scaled)], QUICK, silent)
    assert row["status"] == "FAILED"
    assert "out 0.01" in row["reason"]
    assert "ms" not in row


@pytest.mark.parametrize("lost", ["d_tokens", "d_probs", "d_gate_up", "d_down"])
def test_one_wrong_gradient_is_enough_to_fail(lost: str) -> None:
    def forget(_problem: Problem, built: Built) -> Built:
        class Forgetful(Built):
            def outcome(self, out: Tensor, grads):  # type: ignore[no-untyped-def]
                named = dict(super().outcome(out, grads))
                return named | {lost: [torch.zeros_like(each) for each in named[lost]]}

        return Forgetful(**vars(built))

    (row,) = compare(draw(), [changed("forgetful", forget)], QUICK, silent)
    assert row["status"] == "FAILED"
    assert lost in row["reason"]


def test_an_expert_that_is_lost_fails_even_in_fp8() -> None:
    def lose(problem: Problem, built: Built) -> Built:
        busiest = int(problem.tokens_per_expert.argmax())
        hit = (problem.topk_ids == busiest).any(dim=1, keepdim=True)
        return replace(built, forward=lambda: torch.where(hit, 0 * built.forward(), built.forward()))

    contender = replace(changed("lossy", lose), precision="fp8_current")
    row = compare(replace(draw(dtype=torch.float32)), [contender], QUICK, silent)[0]
    assert row["status"] == "FAILED"


def test_nan_never_agrees() -> None:
    problem = draw()
    reference = reference_outcome(problem)
    spoiled = {name: [x.clone() for x in tensors] for name, tensors in reference.items()}
    spoiled["out"][0][0, 0] = float("nan")
    assert relative_errors(spoiled, reference)["out"] == float("inf")
    assert relative_errors({}, reference)["d_down"] == float("inf")


def test_what_cannot_run_is_a_row_and_the_run_goes_on() -> None:
    def out_of_memory(_problem: Problem) -> Built:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")

    def absent(_problem: Problem) -> Built:
        raise BackendError("not installed: something")

    failing = [
        Contender(name=build.__name__, kind="peer", precision="fp32", build=build)
        for build in (out_of_memory, absent)
    ]
    contenders = [*failing, our_contender("te", "bf16"), our_contender("loop", "fp32")]
    rows = [
        row for _, rows in bench_cases([SIZE], ["random"], contenders, CPU, QUICK, silent) for row in rows
    ]
    status = {row["name"]: row["status"] for row in rows}
    assert status == {
        "out_of_memory": "FAILED", "absent": "unavailable", "te": "unavailable", "loop": "ok"
    }  # fmt: skip
    reasons = {row["name"]: row.get("reason", "") for row in rows}
    assert reasons["out_of_memory"] == "out of memory"
    assert "CUDA" in reasons["te"]


def test_a_contender_that_breaks_while_it_is_timed_is_out_and_the_others_are_timed() -> None:
    calls = {"breaks": 0, "works": 0}

    def breaks() -> None:
        calls["breaks"] += 1
        if calls["breaks"] == 4:
            raise RuntimeError("the third turn")

    def works() -> None:
        calls["works"] += 1

    found = time_interleaved({0: breaks, 1: works}, CPU, rounds=3, repeats=1)
    assert found[0] == "RuntimeError: the third turn"
    assert isinstance(found[1], Timing)
    assert found[1].samples == 3


def test_collections_in_a_benchmark_take_its_own_garbage_and_leave_the_rest() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    def dead_cycle() -> weakref.ref[Cycle]:
        return weakref.ref(Cycle())

    gc.disable()
    try:
        with quick_collections():
            inside = dead_cycle()
            assert gc.get_freeze_count() > 1000
            gc.collect()
            assert inside() is None
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_turns_go_back_and_forth() -> None:
    order: list[str] = []
    steps = {0: lambda: order.append("A"), 1: lambda: order.append("B")}
    time_interleaved(steps, CPU, rounds=2, repeats=1)
    assert "".join(order) == "AAABBB" + "BBBAAA"


def test_precisions_of_different_storage_are_measured_each_on_its_own_weights() -> None:
    contenders = our_contenders(["loop@fp64", "grouped_mm@bf16"], ["fp32"])
    cases = list(bench_cases([SIZE], ["balanced"], contenders, CPU, QUICK, silent))
    assert [case["dtype"] for case, _ in cases] == ["float64", "bfloat16"]
    assert [row["status"] for _, rows in cases for row in rows] == ["ok", "ok"]
    assert cases[0][1][0]["worst_error"] < 1e-10 < cases[1][1][0]["worst_error"]


def test_unknown_names_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="--backends=lop"):
        our_contenders(["lop"], ["fp32"])
    with pytest.raises(ConfigError, match="unknown precision: fp7"):
        our_contenders(["loop@fp7"], ["fp32"])
    with pytest.raises(ConfigError, match="--peers=megatron"):
        peer_contenders(["megatron"], "fp32")
    assert "liger" in PEERS


@pytest.mark.gpu
def test_on_a_gpu_every_contender_says_what_it_needs() -> None:
    device = torch.device("cuda", 0)
    size = shape("h=256,f=512,E=8,k=2", tokens=1024)
    contenders = [
        *our_contenders(["loop", "grouped_mm", "grouped_mm_fused"], ["bf16"]),
        *(our_contenders(["grouped_fp8"], []) if torch.cuda.get_device_capability()[0] == 9 else []),
        *peer_contenders(["hf-eager", "hf-grouped_mm", "torchtitan-like"], "bf16"),
    ]
    rows = [
        row
        for _, rows in bench_cases([size], ["zipf:1.2"], contenders, device, QUICK, silent)
        for row in rows
    ]
    assert {row["name"]: row.get("reason") for row in rows if row["status"] != "ok"} == {}
    assert all(row["held_bytes"] > 0 and row["peak_bytes"] > row["held_bytes"] for row in rows)
    waits = {row["name"]: row["host_syncs"] for row in rows}
    assert waits["grouped_mm_fused"] == 0
    assert waits.get("grouped_fp8", 0) == 0
    assert waits["loop"] > 0
    assert all(row["launches"] > 0 for row in rows)
