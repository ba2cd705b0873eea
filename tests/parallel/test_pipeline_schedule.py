"""Schedules against a stepwise oracle: complete, playable, as fast and as frugal as the papers say."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.errors import ConfigError
from isozyme.parallel.pipeline_schedule import Action, Schedule, forward_schedule, schedule
from isozyme.parallel.pipeline_timeline import Timeline, play


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """(kind, stages, micro_batches, chunks), all legal."""
    kind = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    stages = draw(st.integers(1, 8))
    if kind != "interleaved":
        return kind, stages, draw(st.integers(1, 20)), 1
    chunks = draw(st.integers(1, 4)) if stages > 1 else 1
    return kind, stages, stages * draw(st.integers(1, 5)), chunks


def oracle(made: Schedule, forward: int, backward: int) -> tuple[int, list[int]]:
    """When the last action ends, and each stage's peak of activations: unit by unit, nothing precomputed."""
    stages = len(made)
    last = stages * (1 + max(action.chunk for action in made[0])) - 1
    queue, busy = [list(actions) for actions in made], [0] * stages
    done: set[tuple[str, int, int]] = set()
    running: list[Action | None] = [None] * stages
    flying, peak, now = [0] * stages, [0] * stages, 0
    while any(queue) or any(running):
        for s in range(stages):
            action = queue[s][0] if queue[s] else None
            if running[s] is not None or action is None:
                continue
            v, m = action.chunk * stages + s, action.micro_batch
            needs = {("F", v - 1, m)} if action.kind == "F" else {("F", v, m), ("B", v + 1, m)}
            if {n for n in needs if 0 <= n[1] <= last} <= done:
                running[s], busy[s] = queue[s].pop(0), forward if action.kind == "F" else backward
        assert any(running), "deadlock"
        now += 1
        for s in range(stages):
            action = running[s]
            busy[s] -= 1
            if action is not None and busy[s] == 0:
                done.add((action.kind, action.chunk * stages + s, action.micro_batch))
                flying[s] += 1 if action.kind == "F" else -1
                peak[s] = max(peak[s], flying[s])
                running[s] = None
    return now, peak


def in_flight(kind: str, stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """What the papers say a stage keeps."""
    if kind == "gpipe":
        return micro_batches
    if kind == "1f1b":
        return min(stages - stage, micro_batches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, micro_batches * chunks)


@given(schedules())
def test_each_micro_batch_goes_once_forward_and_once_backward_through_each_chunk(
    drawn: tuple[Any, ...],
) -> None:
    _, stages, micro_batches, chunks = drawn
    made = schedule(*drawn)
    assert len(made) == stages
    expected = Counter(
        Action(kind, c, m) for kind in ("F", "B") for c in range(chunks) for m in range(micro_batches)
    )
    assert all(Counter(actions) == expected for actions in made)


@given(schedules(), st.integers(1, 3), st.integers(1, 3))
def test_time_and_activations_are_those_of_the_oracle_and_of_the_papers(
    drawn: tuple[Any, ...], forward: int, backward: int
) -> None:
    kind, stages, micro_batches, chunks = drawn
    made = schedule(*drawn)
    timeline = play(made, forward=forward, backward=backward)
    length, peaks = oracle(made, forward, backward)
    assert timeline.length == length
    assert [timeline.peak_in_flight(stage) for stage in range(stages)] == peaks
    assert peaks == [in_flight(kind, stage, stages, micro_batches, chunks) for stage in range(stages)]
    share = (stages - 1) / (chunks * micro_batches + stages - 1)
    assert timeline.bubble_share == pytest.approx(share, abs=1e-12)


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
def test_forwards_alone_come_in_a_playable_order(stages: int, micro_batches: int, chunks: int) -> None:
    chunks = chunks if stages > 1 else 1
    made = forward_schedule(stages, micro_batches, chunks)
    assert {action.kind for actions in made for action in actions} == {"F"}
    timeline = play(made)
    assert timeline.length == oracle(made, 1, 1)[0]
    if micro_batches % stages == 0:
        share = (stages - 1) / (chunks * micro_batches + stages - 1)
        assert timeline.bubble_share == pytest.approx(share, abs=1e-12)


@given(schedules())
def test_micro_batches_keep_their_order_in_each_chunk(drawn: tuple[Any, ...]) -> None:
    _, _, micro_batches, chunks = drawn
    for actions in schedule(*drawn):
        for kind in ("F", "B"):
            for chunk in range(chunks):
                order = [a.micro_batch for a in actions if (a.kind, a.chunk) == (kind, chunk)]
                assert order == list(range(micro_batches))


def test_interleaving_shrinks_the_bubble_and_1f1b_the_memory() -> None:
    by_kind = {
        kind: play(schedule(kind, 4, 16, chunks), backward=2)  # type: ignore[arg-type]
        for kind, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 4))
    }
    assert by_kind["gpipe"].length == by_kind["1f1b"].length
    assert by_kind["interleaved"].bubble_share == pytest.approx(3 / 67)
    assert by_kind["1f1b"].bubble_share == pytest.approx(3 / 19)
    assert (by_kind["gpipe"].peak_in_flight(0), by_kind["1f1b"].peak_in_flight(0)) == (16, 4)


def test_a_timeline_prints_stages_as_rows_and_time_as_columns() -> None:
    assert str(play(schedule("interleaved", 2, 2, 2), backward=2)).splitlines() == [
        "stage 0: F0   F1   F0'1 F1'1 .    .    B0'1 -    .    B1'1 -    B0   -    B1   -",
        "stage 1: .    F0   F1   F0'1 B0'1 -    F1'1 B1'1 -    B0   -    B1   -    .    .",
    ]


def actions(text: str) -> list[Action]:
    return [Action(word[0], 0, int(word[1:])) for word in text.split()]  # type: ignore[arg-type]


def test_a_schedule_of_your_own_that_deadlocks_is_refused() -> None:
    crossed = [actions("F0 B0 F1 B1"), actions("F1 B1 F0 B0")]
    with pytest.raises(ConfigError, match="stage 0 waits at B0; stage 1 waits at F1"):
        play(crossed)


@pytest.mark.parametrize("second", ["F0 B0", "F0 F1 B0 B1 B1", "F0 B0 F1 B2", "B0 B1"])
def test_a_schedule_with_too_much_or_too_little_is_refused(second: str) -> None:
    with pytest.raises(ConfigError, match=r"once: stage [01] has"):
        play([actions("F0 B0 F1 B1"), actions(second)])


def test_an_unusual_but_legal_schedule_is_played() -> None:
    made = [actions("F1 F0 B1 B0"), actions("F1 B1 F0 B0")]
    assert isinstance(play(made), Timeline)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 1), "stages must be at least 1: stages=0"),
        (("1f1b", 2, 0), "micro_batches must be at least 1"),
        (("1f1b", 2, 4, 2), "several chunks need the interleaved schedule and several stages: kind=1f1b"),
        (("interleaved", 1, 4, 2), "stages=1, chunks=2. Use chunks=1."),
        (("interleaved", 4, 6, 2), "micro_batches=6, stages=4; 6 % 4 = 2. The nearest is 8."),
        (("interleaved", 4, 1, 2), "The nearest is 4."),
    ],
)
def test_an_impossible_schedule_is_refused_with_legal_values(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        schedule(*arguments)


@pytest.mark.usefixtures("unchecked_annotations")
def test_an_unknown_schedule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean '1f1b'"):
        schedule("1f2b", 2, 4)  # type: ignore[arg-type]
