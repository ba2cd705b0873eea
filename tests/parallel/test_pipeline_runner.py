"""The runner against one ordinary backward through all chunks, for any schedule and any order of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.errors import UsageError
from isozyme.parallel.communicator import Communicator, Pending, SingleCommunicator
from isozyme.parallel.distributed import TorchWorld
from isozyme.parallel.pipeline_runner import ChunkOutput, run_schedule
from isozyme.parallel.pipeline_schedule import Action, Schedule, forward_schedule, schedule
from isozyme.parallel.simulated import SimulatedWorld, simulate
from isozyme.parallel.simulated_torch import simulate_torch
from tests.parallel.test_pipeline_schedule import schedules

WIDTH = 3


def weights(virtual_stages: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(virtual_stages)
    ]


def inputs(micro_batch: int) -> Tensor:
    """Micro-batches differ in values and in the number of rows."""
    generator = torch.Generator().manual_seed(100 + micro_batch)
    return torch.randn(1 + micro_batch % 3, WIDTH, generator=generator, dtype=torch.float64)


def chunk(weight: Tensor, number: int, last: int, micro_batch: int, hidden: Tensor | None) -> ChunkOutput:
    """A layer, with a loss of its own on every second virtual stage, and the main loss at the end."""
    x = torch.tanh((inputs(micro_batch) if hidden is None else hidden) @ weight)
    own = 0.1 * (number + 1) * x.square().sum() if number % 2 else None
    if number < last:
        return ChunkOutput(hidden=x, loss=own)
    main = (x * (1 + micro_batch)).sum()
    return ChunkOutput(loss=main if own is None else main + own)


def expected(virtual_stages: int, micro_batches: int) -> list[Tensor]:
    """The gradient of every weight, from one backward through everything."""
    held = weights(virtual_stages)
    total = torch.zeros((), dtype=torch.float64)
    for m in range(micro_batches):
        hidden: Tensor | None = None
        for number, weight in enumerate(held):
            output = chunk(weight, number, virtual_stages - 1, m, hidden)
            hidden = output.hidden
            if output.loss is not None:
                total = total + output.loss
    return list(torch.autograd.grad(total, held))


def run_stage(made: Schedule, comm: Communicator, count: list[int] | None = None) -> dict[int, Tensor]:
    """The gradients of one stage's weights by virtual stage."""
    stages = len(made)
    virtual = stages * (1 + max(action.chunk for action in made[0]))
    held = weights(virtual)

    def forward(number: int, micro_batch: int, hidden: Tensor | None) -> ChunkOutput:
        if count is not None:
            count.append(micro_batch)
        v = number * stages + comm.rank
        return chunk(held[v], v, virtual - 1, micro_batch, hidden)

    run_schedule(made, forward, comm, lambda m: torch.empty_like(inputs(m)))
    mine = range(comm.rank, virtual, stages)
    return {v: held[v].grad for v in mine if held[v].grad is not None}


@given(schedules(), st.integers(0, 2**16))
def test_any_schedule_gives_the_gradients_of_one_backward(drawn: tuple[Any, ...], seed: int) -> None:
    _, stages, micro_batches, chunks = drawn
    made = schedule(*drawn)
    found: dict[int, Tensor] = {}
    for part in simulate(stages, lambda world: run_stage(made, world.whole("pp")), schedule_seed=seed):
        found |= part
    for v, gradient in enumerate(expected(stages * chunks, micro_batches)):
        torch.testing.assert_close(found[v], gradient, rtol=1e-12, atol=1e-12)


def test_a_schedule_of_your_own_runs_too() -> None:
    def line(text: str) -> Sequence[Action]:
        return [Action(word[0], 0, int(word[1:])) for word in text.split()]  # type: ignore[arg-type]

    made = [line("F1 F0 F2 B1 B0 B2"), line("F1 B1 F0 F2 B0 B2")]
    first, second = simulate(2, lambda world: run_stage(made, world.whole("pp")))
    for v, gradient in enumerate(expected(2, 3)):
        torch.testing.assert_close((first | second)[v], gradient)


def test_forwards_alone_leave_no_gradient() -> None:
    made = forward_schedule(3, 7, 2)

    def rank(world: SimulatedWorld) -> tuple[dict[int, Tensor], list[int]]:
        seen: list[int] = []
        with torch.no_grad():
            return run_stage(made, world.whole("pp"), seen), seen

    for gradients, seen in simulate(3, rank):
        assert gradients == {}
        assert sorted(seen) == sorted(list(range(7)) * 2)


def test_one_stage_is_an_ordinary_backward_and_needs_no_peer() -> None:
    found = run_stage(schedule("1f1b", 1, 4), SingleCommunicator("pp"))
    torch.testing.assert_close(found[0], expected(1, 4)[0])


def batches_of(made: Schedule, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What one stage hands to its communicator at once, in order: s for each send, r for each receive."""
    seen: list[str] = []
    plain = comm.exchange_async

    def noting(sends: Any, recvs: Any) -> Pending:
        seen.append("s" * len(sends) + "r" * len(recvs))
        return plain(sends, recvs)

    monkeypatch.setattr(comm, "exchange_async", noting)
    run_stage(made, comm)
    return seen


def test_in_the_steady_state_of_1f1b_a_stage_sends_and_receives_in_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = schedule("1f1b", 3, 6)
    first, middle, last = simulate(3, lambda world: batches_of(made, world.whole("pp"), monkeypatch))
    assert first == ["s", "s", "s", "r", "sr", "sr", "sr", "r", "r"]
    assert middle == ["r", "sr", "sr", "r", "s", *["sr"] * 7, "s", "r", "s"]
    assert last == ["r", "r", "s", "sr", "sr", "sr", "sr", "s"]


def test_a_batch_is_one_call_of_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sizes = schedule("1f1b", 2, 4), []
    plain = dist.batch_isend_irecv

    def noting(operations: list[dist.P2POp]) -> list[dist.Work]:
        sizes.append(len(operations))
        return plain(operations)

    monkeypatch.setattr(dist, "batch_isend_irecv", noting)

    def rank(_: Any) -> list[str]:
        comm = TorchWorld().whole("pp")
        comm.barrier()
        return batches_of(made, comm, monkeypatch)

    batches = simulate_torch(2, rank)
    assert sorted(sizes) == sorted(len(each) for of_rank in batches for each in of_rank)
    assert sizes.count(2) == 4, "both stages, twice each"


def test_what_no_loss_depends_on_gets_a_zero_gradient_and_blocks_nobody() -> None:
    made = schedule("1f1b", 2, 3)

    def rank(world: SimulatedWorld) -> Tensor | None:
        comm = world.whole("pp")
        weight = torch.ones(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True)

        def forward(_: int, micro_batch: int, hidden: Tensor | None) -> ChunkOutput:
            if hidden is None:
                return ChunkOutput(hidden=inputs(micro_batch) @ weight)
            return ChunkOutput(loss=weight.sum())

        run_schedule(made, forward, comm, lambda m: torch.empty_like(inputs(m)))
        return weight.grad

    first, last = simulate(2, rank)
    assert first is not None
    assert not first.any()
    assert (last == 3).all()


def test_the_first_stages_keep_only_the_activations_in_flight() -> None:
    """A tensor that was sent lives on in no list: only what the graph itself saved does."""
    made = schedule("1f1b", 2, 40)
    alive: list[int] = []

    def rank(world: SimulatedWorld) -> None:
        comm, weight = world.whole("pp"), weights(1)[0]
        living = [0]

        class Tracked(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                living[0] += 1
                alive.append(living[0])
                ctx.save_for_backward(x)
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                living[0] -= 1
                return grad

        def forward(_: int, micro_batch: int, hidden: Tensor | None) -> ChunkOutput:
            x = Tracked.apply((inputs(micro_batch) if hidden is None else hidden) @ weight)
            return ChunkOutput(hidden=x) if comm.rank == 0 else ChunkOutput(loss=x.sum())

        run_schedule(made, forward, comm, lambda m: torch.empty_like(inputs(m)))

    simulate(2, rank)
    assert max(alive) == 2


def test_hidden_states_of_another_shape_are_refused_before_they_are_sent() -> None:
    def rank(world: SimulatedWorld) -> None:
        def forward(_: int, micro_batch: int, hidden: Tensor | None) -> ChunkOutput:
            return ChunkOutput(hidden=torch.zeros(2, 2), loss=None)

        run_schedule(forward_schedule(2, 1), forward, world.whole("pp"), lambda _: torch.empty(2, 3))

    with pytest.raises(UsageError, match=r"F0 on stage 0 made \(2, 2\).*hidden_like says \(2, 3\)"):
        simulate(2, rank)


def test_a_schedule_for_another_number_of_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="Make it for stages=1"):
        run_schedule(
            schedule("1f1b", 2, 2),
            lambda *_: ChunkOutput(),
            SingleCommunicator("pp"),
            lambda _: torch.empty(1),
        )
