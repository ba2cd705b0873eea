"""Simulated worlds: runs replay, ranks have surroundings of their own, and every seeded fault is found."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.errors import CommunicationError, ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.simulated import Delay, Fault, SimulatedWorld, simulate
from isozyme.parallel.simulated_baton import Baton, simulating

Program = Callable[[SimulatedWorld, Communicator], object]


def run(program: Program, size: int = 2, **options: object) -> object:
    return simulate(size, lambda world: program(world, world.whole("ep")), **options)  # type: ignore[call-overload]


def fails(program: Program, pattern: str, size: int = 2) -> str:
    """The message of the error, which must be found at once, whatever the schedule, leaving no thread."""
    for seed in range(5):
        began, threads = time.perf_counter(), threading.active_count()
        with pytest.raises(CommunicationError, match=pattern) as caught:
            run(program, size, schedule_seed=seed)
        assert time.perf_counter() - began < 1
        assert threading.active_count() == threads
    return str(caught.value)


class TestResults:
    def test_backward_stays_on_the_thread_of_its_rank_on_every_device(self) -> None:
        # A GPU's backward would run on one thread for all ranks, where the first collective waits for ever.
        assert simulate(2, lambda _world: torch._C._is_multithreading_enabled()) == [False, False]
        assert torch._C._is_multithreading_enabled()

    def test_results_come_in_rank_order(self) -> None:
        assert simulate(5, lambda world: world.rank) == [0, 1, 2, 3, 4]

    @given(size=st.integers(1, 5), seed=st.integers(0, 5))
    def test_collectives_mean_what_they_say(self, size: int, seed: int) -> None:
        def program(world: SimulatedWorld) -> None:
            comm, rank = world.whole(), world.rank
            assert comm.all_reduce(torch.tensor([rank, 1])).tolist() == [size * (size - 1) // 2, size]
            assert comm.all_reduce(torch.tensor(rank), "max").item() == size - 1
            assert comm.all_reduce(torch.tensor(-rank), "min").item() == 1 - size
            uneven = list(range(size))
            gathered = comm.all_gather(torch.full((rank, 2), rank), uneven)
            assert gathered.tolist() == [[r, r] for r in range(size) for _ in range(r)]
            given = torch.arange(sum(uneven)) * (rank + 1)
            start = sum(uneven[:rank])
            summed = comm.reduce_scatter(given, uneven)
            assert summed.tolist() == [i * size * (size + 1) // 2 for i in range(start, start + rank)]
            sent = torch.tensor([[10 * rank + peer] for peer in range(size) for _ in range(peer)])
            got = comm.all_to_all(sent.view(-1, 1), [rank] * size, uneven)
            assert got.flatten().tolist() == [10 * peer + rank for peer in range(size) for _ in range(rank)]
            assert comm.broadcast(torch.tensor([rank]), size - 1).item() == size - 1
            assert comm.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
            comm.barrier()
            if size > 1:
                after, before = (rank + 1) % size, (rank - 1) % size
                ring = comm.exchange([(torch.tensor([rank]), after)], [(torch.zeros(1).long(), before)])
                assert ring[0].item() == before

        simulate(size, program, schedule_seed=seed)

    def test_messages_between_two_ranks_keep_their_order(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> list[int]:
            if world.rank == 0:
                for value in range(3):
                    comm.send(torch.tensor([value]), 1)
                return []
            return [int(comm.recv(torch.zeros(1, dtype=torch.long), 0)) for _ in range(3)]

        assert run(program) == [[], [0, 1, 2]]

    def test_sums_run_in_rank_order_whatever_the_schedule(self) -> None:
        values = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 1e-8]), torch.tensor([-1e8, -1.0])]
        expected = values[0] + values[1] + values[2]
        for seed in range(6):
            got = simulate(3, lambda w: w.whole().all_reduce(values[w.rank].clone()), schedule_seed=seed)
            assert all(torch.equal(value, expected) for value in got)

    def test_objects_are_copies(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> list[list[int]]:
            found = comm.all_gather_object([world.rank])
            found[0].append(99)
            return comm.all_gather_object(found[0])

        assert run(program) == [[[0, 99], [0, 99]]] * 2

    def test_a_pending_result_may_be_waited_for_twice(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> float:
            pending = comm.all_reduce_async(torch.ones(()))
            pending.wait()
            return pending.wait().item()

        assert run(program) == [2.0, 2.0]

    def test_meta_tensors_travel(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> tuple[int, ...]:
            return tuple(comm.reduce_scatter(torch.empty(6, 2, device="meta")).shape)

        assert run(program) == [(3, 2), (3, 2)]

    def test_process_groups_are_built_on_it(self) -> None:
        topology = Topology(Layout(tp=2, dp=2, ep=2))

        def program(world: SimulatedWorld) -> tuple[int, int]:
            groups = ProcessGroups(topology, world)
            ones = torch.tensor(world.rank)
            return int(groups["ep"].all_reduce(ones.clone())), int(groups["dp"].all_reduce(ones.clone()))

        expected = [(sum(topology.group(rank, "ep")), sum(topology.group(rank, "dp"))) for rank in range(4)]
        assert simulate(4, program) == expected


class TestReplay:
    @staticmethod
    def order(**options: object) -> list[int]:
        order: list[int] = []

        def program(world: SimulatedWorld, comm: Communicator) -> None:
            for _ in range(4):
                order.append(world.rank)
                comm.barrier()

        run(program, 4, **options)
        return order

    def test_the_same_seed_gives_the_same_order(self) -> None:
        assert self.order(schedule_seed=3) == self.order(schedule_seed=3)

    def test_different_seeds_give_different_orders(self) -> None:
        assert len({tuple(self.order(schedule_seed=seed)) for seed in range(5)}) > 1

    def test_a_schedule_chooses_who_runs(self) -> None:
        assert self.order(schedule=max)[:4] == [3, 2, 1, 0]
        assert self.order(schedule=min)[:4] == [0, 1, 2, 3]

    @given(choices=st.lists(st.integers(0, 7), min_size=1, max_size=20))
    def test_every_schedule_gives_the_same_results(self, choices: list[int]) -> None:
        taken = iter(choices * 100)

        def schedule(ready: Sequence[int]) -> int:
            return ready[next(taken) % len(ready)]

        def program(world: SimulatedWorld, comm: Communicator) -> list[float]:
            x = torch.randn(3)
            return comm.all_reduce(comm.all_to_all(x)).tolist()

        assert run(program, 3, schedule=schedule) == run(program, 3)

    def test_a_schedule_that_chooses_a_waiting_rank_is_refused(self) -> None:
        with pytest.raises(ValueError, match="the schedule must choose one of the ranks that may run: 0"):
            run(lambda world, comm: comm.barrier(), 3, schedule=lambda ready: 0)


class TestSurroundings:
    """The first two drive the baton itself: beartype draws from Python's stream in communicator calls."""

    @pytest.mark.parametrize(
        "draw", [lambda: torch.rand(1).item(), random.random, lambda: float(np.random.rand())]
    )
    def test_each_rank_has_a_stream_of_its_own_that_no_schedule_changes(
        self, draw: Callable[[], float]
    ) -> None:
        def drawn(schedule_seed: int, seed: int = 0) -> list[list[float]]:
            values: list[list[float]] = [[], [], []]
            baton = Baton(3, random.Random(schedule_seed).choice, AssertionError, seed)

            def body(rank: int) -> None:
                for _ in range(4):
                    values[rank].append(draw())
                    baton.offer(rank)

            baton.run(body)
            return values

        first = drawn(0)
        assert all(drawn(schedule_seed) == first for schedule_seed in range(1, 5))
        assert len({value for values in first for value in values}) == 12
        assert drawn(0, seed=1) != first

    def test_the_callers_streams_and_default_dtype_are_left_alone(self) -> None:
        baton = Baton(2, random.Random(0).choice, AssertionError, 0)

        def seeded() -> None:
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)

        def values() -> tuple[float, float, float]:
            return torch.rand(1).item(), random.random(), np.random.rand()

        def body(rank: int) -> None:
            torch.set_default_dtype(torch.float64)
            values()
            baton.offer(rank)
            seeded()

        seeded()
        expected = values()
        seeded()
        baton.run(body)
        assert values() == expected
        assert torch.get_default_dtype() == torch.float32

    def test_the_default_dtype_belongs_to_the_rank(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> torch.dtype:
            if world.rank == 0:
                torch.set_default_dtype(torch.float64)
            comm.barrier()
            return torch.ones(1).dtype

        assert run(program) == [torch.float64, torch.float32]

    def test_the_callers_modes_are_entered_in_each_rank(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> tuple[object, ...]:
            comm.barrier()
            product = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
            return torch.is_grad_enabled(), product.dtype, torch.ones(1).device.type

        assert run(program) == [(True, torch.float32, "cpu")] * 2
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert run(program) == [(False, torch.bfloat16, "meta")] * 2

    def test_recomputed_dropout_draws_the_same_mask(self) -> None:
        """The recomputation saves and restores the random state around other ranks' draws."""

        def program(world: SimulatedWorld, comm: Communicator) -> bool:
            masks = []

            def body(x: torch.Tensor) -> torch.Tensor:
                comm.barrier()
                y = torch.nn.functional.dropout(x, 0.5)
                masks.append(y.detach().clone())
                comm.barrier()
                return y * y

            x = torch.ones(64, requires_grad=True)
            torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False).sum().backward()
            return torch.equal(masks[0], masks[1])

        assert run(program, 3) == [True] * 3

    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_collectives_of_a_backward_pass_run_on_the_thread_of_the_rank(self, device: str) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> bool:
            here, seen = threading.get_ident(), []
            x = torch.ones(1, requires_grad=True, device=device)
            y = x * 2
            y.register_hook(lambda grad: seen.append(threading.get_ident()) or comm.all_reduce(grad.clone()))
            y.sum().backward()
            return seen == [here] and simulating()

        assert run(program) == [True, True]
        assert not simulating()


class TestFaults:
    def test_different_collectives(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            if world.rank == 0:
                comm.all_reduce(torch.ones(2))
            else:
                comm.barrier()

        text = fails(program, "the same collectives in the same order: group=ep")
        assert "rank 0 calls all_reduce((2,) float32, sum) at tests/parallel/test_simulated.py:" in text
        assert "rank 1 calls barrier() at tests/parallel/test_simulated.py:" in text

    @pytest.mark.parametrize(
        ("call", "pattern"),
        [
            (lambda c, r: c.all_reduce(torch.ones(2 + r)), "the shape"),
            (lambda c, r: c.all_reduce(torch.ones(2, dtype=[torch.float32, torch.float64][r])), "the dtype"),
            (lambda c, r: c.all_reduce(torch.ones(2), ["sum", "max"][r]), "the operation"),
            (lambda c, r: c.broadcast(torch.ones(2), r), "the root"),
            (lambda c, r: c.all_gather(torch.ones(2 + r)), "the sizes"),
            (lambda c, r: c.all_gather(torch.ones(2, 2 + r)), "the shape beyond dim 0"),
            (lambda c, r: c.all_gather(torch.ones((2,) * (1 + r)), [2, 2]), "number of dims"),
            (lambda c, r: c.reduce_scatter(torch.ones(4), [[1, 3], [3, 1]][r]), "the sizes"),
            (lambda c, r: c.all_to_all(torch.ones(2, 2 + r)), "the shape beyond dim 0"),
            (
                lambda c, r: c.all_to_all(torch.ones(3), [1, 2], [[1, 2], [2, 1]][r]),
                r"rank 1 sends 2 to rank 0 \(input_splits\[0\]\), which expects 2|rank 0 sends 2 to rank 1|"
                r"rank 1 sends 2 to rank 0|rank 1 sends 1 to rank 1",
            ),
        ],
    )
    def test_disagreement(self, call: Callable[[Communicator, int], object], pattern: str) -> None:
        fails(lambda world, comm: call(comm, world.rank), pattern)

    def test_splits_that_differ_name_both_numbers(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            comm.all_to_all(torch.ones(3), [[1, 1], [2, 2]][world.rank], [[1, 2], [2, 1]][world.rank])

        fails(
            program, r"rank 1 sends 2 to rank 0 \(input_splits\[0\]\), which expects 1 \(output_splits\[1\]\)"
        )

    def test_deadlock_of_two_groups_in_different_order(self) -> None:
        def program(world: SimulatedWorld, ep: Communicator) -> None:
            tp = world.whole("tp")
            first, second = (ep, tp) if world.rank == 0 else (tp, ep)
            first.barrier()
            second.barrier()

        text = fails(program, "deadlock: 2 of 2 ranks wait and none can go on")
        assert "rank 0 waits in barrier() over ep (ranks 0, 1) at tests/parallel/test_simulated.py:" in text
        assert "rank 1 waits in barrier() over tp (ranks 0, 1)" in text

    def test_two_plain_sends_that_cross(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            comm.send(torch.ones(2), 1 - world.rank)
            comm.recv(torch.ones(2), 1 - world.rank)

        fails(program, r"rank 0 waits in send(.|\n)* for rank 1\n(.|\n)*rank 1 waits in send")

    def test_a_send_without_a_receive(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            if world.rank == 0:
                comm.send(torch.ones(2), 1)

        fails(program, r"rank 0 waits in send\((.|\n)*for rank 1\n  rank 1 has returned")

    def test_a_receive_from_the_wrong_rank(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            if world.rank == 0:
                comm.send(torch.ones(2), 1)
            if world.rank == 1:
                comm.recv(torch.ones(2), 2)

        fails(program, r"rank 1 waits in recv(.|\n)* for rank 2\n  rank 2 has returned", 3)

    @pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
    def test_a_receive_of_another_shape_or_dtype(self, wrong: torch.Tensor) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            if world.rank == 0:
                comm.send(torch.ones(2), 1)
            else:
                comm.recv(wrong.clone(), 0)

        fails(program, "a send and its receive must agree on the (shape|dtype)")

    def test_a_rank_that_returned(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            if world.rank != 1:
                comm.all_reduce(torch.ones(1))

        fails(program, r"deadlock: 2 of 3(.|\n)*for rank 1\n(.|\n)*rank 1 has returned", 3)

    def test_a_pending_that_is_never_waited_for(self) -> None:
        fails(
            lambda world, comm: comm.all_reduce_async(torch.ones(1)) and None,
            r"must be waited for: rank=\d, group=ep.*test_simulated.py:\d+, but the rank returned",
        )

    def test_an_input_changed_while_it_is_sent(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            x = torch.ones(2)
            pending = comm.all_gather_async(x)
            x += world.rank
            pending.wait()

        fails(program, "must not change while it is being sent: rank=1")

    def test_a_buffer_with_nan_is_not_taken_for_changed(self) -> None:
        assert torch.isnan(run(lambda world, comm: comm.all_gather(torch.tensor([torch.nan])))[0]).all()  # type: ignore[index]

    def test_splits_of_the_world_that_differ(self) -> None:
        def program(world: SimulatedWorld) -> None:
            world.split("tp" if world.rank else "ep", [(0, 1)])

        with pytest.raises(
            CommunicationError, match=r"split the world alike.*split 0 is (ep|tp) \[\(0, 1\)\]"
        ):
            simulate(2, program)

    def test_a_split_that_one_rank_does_not_make(self) -> None:
        with pytest.raises(CommunicationError, match="every rank must make every split: rank 0 made 0 of 1"):
            simulate(2, lambda world: world.whole() if world.rank else None)

    def test_a_partition_that_lacks_a_rank(self) -> None:
        with pytest.raises(ValueError, match="must name each of the 3 ranks once"):
            simulate(3, lambda world: world.split("tp", [(0, 1)]))

    def test_simulation_in_a_simulation(self) -> None:
        fails(lambda world, comm: simulate(2, lambda inner: None), "cannot simulate a world")

    def test_a_world_without_ranks(self) -> None:
        with pytest.raises(ValueError, match="world_size=0"):
            simulate(0, lambda world: None)


class TestErrorsOfRanks:
    def test_the_ranks_own_error_is_raised_and_the_others_are_stopped(self) -> None:
        cleaned: list[int] = []

        def program(world: SimulatedWorld, comm: Communicator) -> None:
            try:
                comm.barrier()
                if world.rank == 1:
                    raise ConfigError("mine")
                comm.barrier()
            except Exception:
                if world.rank != 1:
                    raise AssertionError("the others must not see an ordinary exception") from None
                raise
            finally:
                cleaned.append(world.rank)

        threads = threading.active_count()
        with pytest.raises(ConfigError, match="mine") as caught:
            run(program, 3)
        assert caught.value.__notes__ == ["(raised on simulated rank 1 of 3)"]
        assert sorted(cleaned) == [0, 1, 2]
        assert threading.active_count() == threads

    def test_an_error_cannot_be_swallowed(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> str:
            with contextlib.suppress(CommunicationError):
                comm.all_reduce(torch.ones(1 + world.rank))
            return "went on"

        fails(program, "the shape")

    def test_an_error_in_a_backward_pass_is_the_root_cause(self) -> None:
        def program(world: SimulatedWorld, comm: Communicator) -> None:
            x = torch.ones(1, requires_grad=True)
            y = x * 1

            def hook(grad: torch.Tensor) -> torch.Tensor:
                if world.rank == 1:
                    raise ConfigError("in backward")
                return comm.all_reduce(grad.clone())

            y.register_hook(hook)
            y.sum().backward()

        with pytest.raises(ConfigError, match="in backward"):
            run(program, 3)

    def test_a_fault_is_raised_at_the_given_call(self) -> None:
        reached = []

        def program(world: SimulatedWorld, comm: Communicator) -> None:
            for step in range(4):
                if world.rank == 1:
                    reached.append(step)
                comm.barrier()

        with pytest.raises(OSError, match="gone"):
            run(program, faults=[Fault(1, 2, OSError("gone"))])
        assert reached == [0, 1, 2]

    def test_a_simulation_after_a_failed_one_works(self) -> None:
        with pytest.raises(CommunicationError):
            run(lambda world, comm: comm.barrier() if world.rank else None)
        assert run(lambda world, comm: world.rank) == [0, 1]


class TestTraces:
    def test_a_trace_counts_calls_and_bytes(self) -> None:
        def program(world: SimulatedWorld) -> None:
            comm, rank = world.whole("ep"), world.rank
            comm.all_reduce(torch.ones(4))
            comm.all_gather(torch.ones(1 + rank, 2), [1, 2])
            comm.reduce_scatter(torch.ones(3, 2), [1, 2])
            comm.all_to_all(
                torch.ones(3, 2, dtype=torch.bfloat16), [[1, 2], [2, 1]][rank], [[1, 2], [2, 1]][rank]
            )
            comm.broadcast(torch.ones(2), 1)
            comm.barrier()

        _, trace = simulate(2, program, trace=True)
        assert trace.difference() is None
        assert [record.bytes_sent for record in trace[0]] == [16, 8, 16, 8, 0, 0]
        assert [record.bytes_sent for record in trace[1]] == [16, 16, 8, 8, 8, 0]
        assert trace.bytes_by_group() == {"ep": 104}
        assert trace.bytes_by_group(0) == {"ep": 48}
        record = trace[0][3]
        assert (record.kind, record.group, record.ranks) == ("all_to_all", "ep", (0, 1))
        assert (record.shape, record.dtype) == ((3, 2), torch.bfloat16)
        assert (record.input_sizes, record.output_sizes) == ((1, 2), (1, 2))
        assert str(record.source).startswith("tests/parallel/test_simulated.py:")

    def test_a_trace_names_the_rank_that_makes_another_call(self) -> None:
        def program(world: SimulatedWorld) -> None:
            pair = world.split("tp", [(0, 1), (2, 3)])
            pair.barrier()
            if world.rank < 2:
                pair.all_reduce(torch.ones(1))

        _, trace = simulate(4, program, trace=True)
        difference = trace.difference()
        assert difference is not None
        assert difference.startswith(
            "call 1: rank 0 makes all_reduce over tp at tests/parallel/test_simulated.py:"
        )
        assert difference.endswith("rank 2 makes no call")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_delayed_call_is_made_when_no_other_rank_can_go_on(late: int, seed: int) -> None:
    started: list[int] = []

    def program(world: SimulatedWorld) -> None:
        pending = world.whole().all_reduce_async(torch.ones(1))
        started.append(world.rank)
        pending.wait()

    simulate(3, program, faults=[Delay(late, 0)], schedule_seed=seed)
    assert started[-1] == late


def test_a_rank_that_left_is_named_with_its_last_call() -> None:
    def program(world: SimulatedWorld) -> None:
        comm = world.whole()
        comm.all_reduce(torch.ones(1))
        if world.rank == 0:
            comm.barrier()

    with pytest.raises(CommunicationError, match=r"rank 1 has returned after all_reduce over world at tests"):
        simulate(2, program)


def test_a_dispatch_like_program_on_eight_ranks_takes_milliseconds() -> None:
    """Six all-to-alls (three and their inverses); the bound is loose, for busy machines."""

    def program(world: SimulatedWorld) -> None:
        comm, x = world.whole(), torch.randn(32, 16)
        for _ in range(6):
            x = comm.all_to_all(x)

    simulate(8, program)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        simulate(8, program)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.1
