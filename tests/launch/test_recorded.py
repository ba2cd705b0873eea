"""Which step is recorded, what a replay reads, and what is refused; a stand-in plays the part of CUDA graphs.

The stand-in runs the recorded function again, on the inputs of the recording and into its results.
`tests/gpu/test_recorded_step.py` has the real ones.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from isozyme.core.batch import StepTotals
from isozyme.core.errors import CommunicationError, UsageError
from isozyme.launch import recorded
from isozyme.launch.microbatches import Sums
from isozyme.launch.recorded import EAGER_STEPS, Gradients, RecordedGradients
from isozyme.parallel.grad_buffer import GradientBuffer
from tests.launch.tiny import model_on, tiny
from tests.models.common import random_batch

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


class Graph:
    """Remembers the calls that were made while it was open."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], Gradients]] = []
        self.program: Program | None = None
        self.destroyed = False

    def reset(self) -> None:
        self.destroyed = True

    def replay(self) -> None:
        assert self.program is not None
        for arguments, found in self.calls:
            again = self.program.compute(*arguments)
            found.numbers.copy_(again.numbers)


class Program:
    """What is recorded: sums that depend on every input."""

    def __init__(self) -> None:
        self.recording: Graph | None = None
        self.graphs: list[Graph] = []
        self.end_fails = False
        self.buffer: GradientBuffer | None = None
        self.eager = self.recorded = 0
        self.error: BaseException | None = None

    def __call__(self, batches, divisors) -> Gradients:
        if self.buffer is not None:
            self.buffer.peaks = {0: (torch.tensor(float(batches[0].window_length)),)}
        if self.recording is None:
            self.eager += 1
            return self.compute(batches, divisors)
        if self.error is not None:
            raise self.error
        self.recorded += 1
        found = self.compute(batches, divisors)
        self.recording.calls.append(((batches, divisors), found))
        self.recording.program = self
        return found

    def compute(self, batches, divisors) -> Gradients:
        total = sum(
            batch.tokens.double().sum()
            + 1e3 * batch.label_valid.double().sum()
            + 1e6 * batch.labels.double().sum()
            for batch in batches
        )
        numbers = torch.stack(
            [total / d for d in (divisors.valid_labels, divisors.windows, divisors.real_tokens)] + [total]
        )
        return Gradients(sums=Sums(), numbers=numbers, counts=torch.zeros((2, 0, 0), dtype=torch.int64))


class Stream:
    def wait_stream(self, _other: object) -> None:
        """There is no device to wait for."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    made = Program()

    @contextmanager
    def graph(target: Graph, **_options: object):
        made.recording = target
        made.graphs.append(target)
        try:
            yield
        except BaseException:
            if made.end_fails:
                raise RuntimeError("the capture was broken off")  # noqa: B904 (as torch does)
            raise
        finally:
            made.recording = None

    for name, stand_in in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda _stream: nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": Graph,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(recorded, "_problems", lambda _model: [])
    return made


def made_by(program: Program) -> RecordedGradients:
    model, groups = model_on(tiny())
    return RecordedGradients(program, model, GradientBuffer(model.parameters(), groups))


def inputs(number: int, length: int = 16):
    valid = torch.rand(2, length, generator=torch.Generator().manual_seed(number)) < 0.5
    batches = [random_batch(2, length, seed=10 * number + part, label_valid=valid) for part in range(2)]
    return batches, StepTotals(valid_labels=10 + number, windows=4, real_tokens=64 + number)


def test_steps_after_the_first_replay_one_recording_on_their_own_inputs(program: Program) -> None:
    gradients = made_by(program)
    for number in range(EAGER_STEPS + 3):
        batches, totals = inputs(number)
        found = gradients(batches, totals).numbers.clone()
        expected = program.compute(batches, recorded.Divisors.of(totals, torch.device("cpu"))).numbers
        assert torch.equal(found, expected), number
    assert (program.eager, program.recorded) == (EAGER_STEPS, 1)


def test_other_shapes_are_recorded_anew_and_the_first_are_kept(program: Program) -> None:
    gradients = made_by(program)
    for number in range(3 * EAGER_STEPS):
        for length in (16, 8):
            batches, totals = inputs(number, length)
            expected = program.compute(batches, recorded.Divisors.of(totals, torch.device("cpu"))).numbers
            assert torch.equal(gradients(batches, totals).numbers, expected)
    assert (program.eager, program.recorded) == (2 * EAGER_STEPS, 2)


def test_inputs_are_copied_so_that_those_of_the_caller_stay_as_they_are(program: Program) -> None:
    gradients = made_by(program)
    first, totals = inputs(0)
    before = [batch.tokens.clone() for batch in first]
    for number in range(EAGER_STEPS + 2):
        gradients(first if number <= EAGER_STEPS else inputs(5)[0], totals)
    assert all(torch.equal(batch.tokens, kept) for batch, kept in zip(first, before, strict=True))


def test_a_step_with_packed_windows_runs_as_always_whichever_rank_has_them(program: Program) -> None:
    gradients = made_by(program)
    for number in range(EAGER_STEPS + 4):
        batches, totals = inputs(number)
        if number in (1, EAGER_STEPS + 2):
            totals = replace(totals, packed_windows=1)
        if number == EAGER_STEPS + 2:
            batches = [replace(batch, packed=True) for batch in batches]
        expected = program.compute(batches, recorded.Divisors.of(totals, torch.device("cpu"))).numbers
        assert torch.equal(gradients(batches, totals).numbers, expected), number
    assert (program.eager, program.recorded) == (EAGER_STEPS + 2, 1)


def test_what_cannot_be_replayed_is_refused(program: Program) -> None:
    gradients = made_by(program)
    batches, totals = inputs(0)
    with pytest.raises(
        UsageError, match=r"Batch\.packed=True, and no window .*Make batches with packed=False"
    ):
        gradients([replace(batch, packed=True) for batch in batches], totals)
    with pytest.raises(UsageError, match=r"routing overrides need train.cuda_graph=false"):
        gradients(batches, totals, [[]])


def test_parameters_that_were_frozen_are_refused_by_a_replay_too(program: Program) -> None:
    gradients = made_by(program)
    for number in range(EAGER_STEPS + 1):
        gradients(*inputs(number))
    gradients._buffer.segments[0].parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="requires_grad=False for 1 of them"):
        gradients(*inputs(0))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nmore"),
            UsageError,
            r"waits for the device .*; operation not permitted .* capturing\. Set",
        ),
        (torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError, "^out of memory"),
        (CommunicationError("a peer is gone"), CommunicationError, "^a peer is gone"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_recording_that_fails_says_why_and_leaves_no_graph(program: Program, error, kind, message) -> None:
    gradients = made_by(program)
    batches, totals = inputs(0)
    for _ in range(EAGER_STEPS):
        gradients(batches, totals)
    program.error = error
    with pytest.raises(kind, match=message):
        gradients(batches, totals)
    program.end_fails = True
    with pytest.raises(kind, match=message):
        gradients(batches, totals)
    assert [graph.destroyed for graph in program.graphs] == [True, True]


def test_closing_destroys_every_graph_as_communicators_wait_for_that(program: Program) -> None:
    gradients = made_by(program)
    for number in range(EAGER_STEPS + 2):
        for length in (16, 8):
            gradients(*inputs(number, length))
    assert [graph.destroyed for graph in program.graphs] == [False, False]
    gradients.close()
    assert [graph.destroyed for graph in program.graphs] == [True, True]


def test_a_replay_blames_the_tensors_of_its_own_recording(program: Program) -> None:
    gradients = made_by(program)
    program.buffer = gradients._buffer
    for number in range(EAGER_STEPS + 2):
        for length in (16, 8):
            gradients(*inputs(number, length))
            assert [float(each) for each in program.buffer.peaks[0]] == [length]


def test_a_model_on_a_cpu_cannot_be_recorded() -> None:
    model, groups = model_on(tiny())
    with pytest.raises(UsageError, match=r"its weights must be on CUDA"):
        RecordedGradients(Program(), model, GradientBuffer(model.parameters(), groups))
