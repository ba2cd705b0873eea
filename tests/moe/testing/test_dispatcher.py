"""A wrong dispatcher is refuted by the claim that it breaks, in a world that replays; a right one is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.errors import UsageError
from isozyme.moe.dispatch_alltoall import AllToAllDispatcher
from isozyme.moe.testing import (
    ISOZYME,
    Place,
    Promises,
    Violation,
    check_dispatcher,
    check_permutation,
    parse,
)
from isozyme.moe.testing.drawing import MOST_LINES
from tests.moe.testing import wrong

FAULTS: dict[type[Any], set[str]] = {
    wrong.AnotherRanksRow: {"outputs_equal_the_dense_loop", "rows_stand_under_their_expert"},
    wrong.SwappedChunks: {"outputs_equal_the_dense_loop"},
    wrong.RegroupedTwice: {"outputs_equal_the_dense_loop"},
    wrong.Unsorted: {"rows_stand_under_their_expert"},
    wrong.OffByOneSplit: {
        "rows_stand_under_their_expert",
        "every_kept_slot_arrives_once",
        "the_layout_does_not_matter",
    },
    wrong.DropsTheLast: {"every_kept_slot_arrives_once"},
    wrong.ForeignWeights: {"weights_travel_with_their_rows"},
    wrong.Renormalises: {"weights_travel_with_their_rows"},
    wrong.GlobalRank: {"rows_stand_under_their_expert"},
    wrong.SkipsEmpty: {"ranks_agree_about_their_calls", "ranks_make_the_same_calls"},
    wrong.FreshWhenEmpty: {"ranks_agree_about_their_calls", "empty_experts_get_zero_gradients"},
    wrong.WrongKind: {"ranks_agree_about_their_calls"},
    wrong.MutatesTokens: {"inputs_are_not_mutated"},
    wrong.AveragesGradients: {"token_gradients_equal_the_dense_loop"},
    wrong.SlicesInBackward: {"token_gradients_equal_the_dense_loop"},
    wrong.AveragesExperts: {"expert_gradients_equal_the_dense_loop"},
    wrong.DetachedWeights: {"weight_gradients_equal_the_dense_loop"},
    wrong.WideOutput: {"an_output_is_like_its_input"},
    wrong.KeepsTheFirst: {"the_program_runs_to_its_end", "a_second_step_repeats_the_first"},
    wrong.CountsOneTooMany: {"counts_describe_the_rows"},
    wrong.Raises: {"the_program_runs_to_its_end"},
    wrong.ReadsTheFiller: {"outputs_equal_the_dense_loop"},
}
BY_A_SMALLER_WORLD = {wrong.ForeignWeights, wrong.AveragesGradients}
"""Whose claim is told from others only in a world that takes a second to find; the rest need no time."""


def refuted(factory: Callable[[Place], Any], promises: Promises | None = None, **options: Any) -> Violation:
    with pytest.raises(Violation) as caught:
        check_dispatcher(factory, style="torch", promises=promises, **{"seconds": 0.5, **options})
    return caught.value


def test_the_right_one_passes() -> None:
    report = check_dispatcher(
        wrong.Right, style="torch", promises=Promises(drops=True, ordered=True), examples=16
    )
    assert report.worlds == 24
    assert not report.out_of_time


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_within_its_budget_by_the_claim_that_it_breaks(fault: type[Any]) -> None:
    promises = Promises(filler=fault is wrong.ReadsTheFiller)
    began = time.process_time()
    violation = refuted(fault, promises, seconds=1.0 if fault in BY_A_SMALLER_WORLD else 0.3)
    assert violation.invariant in FAULTS[fault]
    assert time.process_time() - began < 4.0  # of the processor; the budget is at most 1 s by the clock
    again = refuted(fault, promises, replay=violation.replay)
    assert again.invariant == violation.invariant
    assert again.finding == violation.finding


def test_an_order_that_is_not_the_promised_one_is_found_only_where_it_is_promised() -> None:
    assert refuted(wrong.UnstableOrder, Promises(ordered=True)).invariant == "rows_are_in_order"
    check_dispatcher(wrong.UnstableOrder, style="torch", examples=8)


def test_filler_must_be_promised_and_weigh_nothing() -> None:
    assert refuted(wrong.NoisyFiller, Promises(filler=True)).invariant == "filler_weighs_nothing"
    assert refuted(wrong.NoisyFiller).invariant == "filler_weighs_nothing"
    assert refuted(wrong.QuietFiller).invariant == "filler_weighs_nothing"
    check_dispatcher(wrong.QuietFiller, style="torch", promises=Promises(filler=True), examples=8)


def test_state_that_ranks_share_shows_as_dependence_on_the_schedule() -> None:
    violation = refuted(wrong.who_comes_first(), only=["the_schedule_does_not_matter"], seconds=1.0)
    assert violation.invariant == "the_schedule_does_not_matter"


def test_state_that_outlives_a_run_is_told_from_other_faults() -> None:
    violation = refuted(wrong.fails_once())
    assert violation.invariant == "a_world_repeats"
    assert "passed when it was run again" in violation.finding


def test_a_small_fault_gets_a_small_world_without_a_schedule(endless_time: None) -> None:
    violation = refuted(wrong.AnotherRanksRow, examples=30)
    world = parse(violation.replay)
    assert (world.ranks, world.topk, world.schedule, world.delay) == (2, 1, (), None)
    assert sum(map(len, world.ids)) == 2
    assert world.dtype == "float64"


def test_two_faults_are_two_counterexamples() -> None:
    violation = refuted(wrong.TwoFaults, seconds=4.0)
    names = {violation.invariant, *(other.invariant for other in violation.others)}
    assert names >= {"weights_travel_with_their_rows", "an_output_is_like_its_input"}
    assert all(other.replay for other in violation.others)


def test_the_report_draws_the_world_and_says_whose_row_it_is() -> None:
    violation = refuted(wrong.AnotherRanksRow, replay="dp=2 ep=2 experts=2 topk=1 ids=0|0")
    text = str(violation)
    assert "that belongs to token 0 of rank 1" in text
    assert "rank 0 holds e0 | sends t0→e0" in text
    assert "at e0 on rank 0: r0t0 r1t0" in text.replace("r1t0 r0t0", "r0t0 r1t0")
    assert "rank 0: t0 wrong   <-- t0 got what belongs to r1t0" in text
    assert text.endswith("replay='dp=2 ep=2 experts=2 topk=1 ids=0|0'")


def test_a_drawing_has_at_most_forty_lines() -> None:
    ids = "|".join(["0.1.2.3.4.5.6.7"] * 8)
    violation = refuted(wrong.Unsorted, replay=f"dp=8 ep=4 experts=32 topk=8 ids={ids}")
    assert violation.picture.count("\n") < MOST_LINES
    assert "<--" in violation.picture


def test_a_rank_that_left_and_one_that_waits_are_both_named_with_their_lines() -> None:
    text = str(refuted(wrong.FreshWhenEmpty, replay="dp=2 ep=2 experts=2 topk=1 ids=|0"))
    assert "rank 1 waits in all_to_all" in text
    assert "rank 0 has returned after all_to_all over ep at tests/moe/testing/wrong.py:" in text
    both = str(refuted(wrong.WrongKind, replay="dp=2 ep=2 experts=2 topk=1 ids=|0"))
    assert "rank 0 calls barrier() at tests/moe/testing/wrong.py:" in both
    assert "rank 1 calls all_to_all" in both


def test_an_error_of_a_rank_is_kept_as_the_cause() -> None:
    violation = refuted(wrong.Raises)
    assert isinstance(violation.__cause__, ZeroDivisionError)
    assert "ZeroDivisionError" in violation.finding


def test_the_search_is_repeatable(endless_time: None) -> None:
    one, two = (refuted(wrong.ForeignWeights, examples=20, seed=3) for _ in range(2))
    assert (one.replay, one.finding) == (two.replay, two.finding)


def test_a_dispatcher_of_this_package_needs_no_adapter() -> None:
    check_dispatcher(lambda place: AllToAllDispatcher(place.placement), examples=5)

    class LosesAWeight(AllToAllDispatcher):
        def dispatch(self, tokens: Tensor, routing: Any) -> Any:
            found = super().dispatch(tokens, routing)
            found.probs.detach().fill_(1.0)
            return found

    with pytest.raises(Violation, match="weights_travel_with_their_rows"):
        check_dispatcher(lambda place: LosesAWeight(place.placement), seconds=0.5)
    assert ISOZYME.etp


@pytest.mark.parametrize(
    "line",
    [
        "",
        "experts=2",
        "dp=2 experts=2 topk=1 ids=0",
        "experts=1 topk=1 ids=5",
        "experts=1 topk=2 ids=0.0",
        "x",
    ],
)
def test_a_replay_line_that_makes_no_sense_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        check_dispatcher(wrong.Right, style="torch", replay=line)


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(UsageError, match="every_row_was_sent"):
        check_dispatcher(wrong.Right, style="torch", only=["every_row_was_snet"])


# --- Permutations


def permute(tokens: Tensor, ids: Tensor, experts: int) -> Any:
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)[int((flat < 0).sum()) :]
    handle = (order // ids.shape[1], tokens.shape)
    return tokens[handle[0]], torch.bincount(flat[order], minlength=experts), handle


def unpermute(rows: Tensor, handle: Any) -> Tensor:
    return torch.zeros(handle[1], dtype=rows.dtype).index_add(0, handle[0], rows)


def test_a_right_permutation_passes() -> None:
    assert check_permutation(permute, unpermute, examples=40).worlds == 60


def assigned(rows: Tensor, handle: Any) -> Tensor:
    return torch.zeros(handle[1], dtype=rows.dtype).index_put((handle[0],), rows)


def test_assigning_instead_of_adding_is_found() -> None:
    with pytest.raises(Violation, match="outputs_equal_the_dense_loop"):
        check_permutation(permute, assigned, seconds=0.5)


def shifted_by_drops(tokens: Tensor, ids: Tensor, experts: int) -> Any:
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)  # what is not sent sorts first
    kept = int((flat >= 0).sum())
    handle = (order[:kept] // ids.shape[1], tokens.shape)
    return tokens[handle[0]], torch.bincount(flat[flat >= 0], minlength=experts), handle


def test_dropped_slots_that_sort_first_are_found() -> None:
    with pytest.raises(Violation) as caught:
        check_permutation(shifted_by_drops, unpermute, seconds=0.5)
    assert caught.value.invariant in {"every_kept_slot_arrives_once", "rows_stand_under_their_expert"}


def test_an_unstable_permutation_is_found() -> None:
    def backwards(tokens: Tensor, ids: Tensor, experts: int) -> Any:
        rows, counts, (token, shape) = permute(tokens.flip(0), ids.flip(0), experts)
        return rows, counts, (len(tokens) - 1 - token, shape)

    with pytest.raises(Violation, match="rows_are_in_order"):
        check_permutation(backwards, unpermute, seconds=0.5)
