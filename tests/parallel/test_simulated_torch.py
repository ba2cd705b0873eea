"""Collectives of torch.distributed on simulated ranks mean what torch says they mean."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import all_reduce, all_to_all_single, broadcast  # bound before any world exists

from isozyme.parallel.simulated_torch import simulate_torch

# The names of torch 2.11, which 2.13 still accepts.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
N = 3


def ranks(program: Callable[[], Any], size: int = N, **options: Any) -> Any:
    return simulate_torch(size, lambda world: program(), **options)


def value(rank: int, rows: int = 2) -> Tensor:
    """Different on every rank."""
    return torch.arange(1, rows * 2 + 1, dtype=torch.float64).view(rows, 2) * (rank + 1) + 0.25 * rank


VALUES = [value(rank) for rank in range(N)]
REDUCTIONS = {
    dist.ReduceOp.SUM: torch.stack(VALUES).sum(0),
    dist.ReduceOp.AVG: torch.stack(VALUES).mean(0),
    dist.ReduceOp.PRODUCT: torch.stack(VALUES).prod(0),
    dist.ReduceOp.MIN: torch.stack(VALUES).amin(0),
    dist.ReduceOp.MAX: torch.stack(VALUES).amax(0),
}


def waited(work: Any) -> None:
    if work is not None:
        assert work.wait()


def each_way(program: Callable[[bool], Any]) -> list[Any]:
    """The results of the ranks, which synchronous and asynchronous calls and all schedules agree on."""
    first = ranks(lambda: program(False))
    for seed in range(3):
        torch.testing.assert_close(ranks(lambda: program(True), schedule_seed=seed), first, rtol=0, atol=0)
    return first


class TestWorld:
    def test_torch_is_initialised_with_the_rank(self) -> None:
        def program() -> tuple[Any, ...]:
            assert dist.is_initialized()
            assert dist.group.WORLD is not None
            assert dist.GroupMember.WORLD is dist.group.WORLD
            assert dist.get_process_group_ranks(dist.group.WORLD) == [0, 1, 2]
            assert dist.get_process_group_ranks(None) == [0, 1, 2]
            assert dist.get_backend() == "simulated"
            return dist.get_rank(), dist.get_world_size(), dist.get_rank(dist.group.WORLD)

        assert ranks(program) == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]

    def test_a_world_of_one_rank_is_an_ordinary_world(self) -> None:
        def program() -> list[float]:
            x, out = torch.tensor([3.0]), torch.zeros(1)
            all_reduce(x)
            all_to_all_single(out, x)
            dist.barrier()
            return out.tolist()

        assert ranks(program, 1) == [[3.0]]


class TestCollectives:
    @pytest.mark.parametrize("op", REDUCTIONS, ids=str)
    def test_all_reduce_gives_every_rank_the_reduction(self, op: Any) -> None:
        def program(async_op: bool) -> Tensor:
            x = value(dist.get_rank())
            waited(all_reduce(x, op, async_op=async_op))
            return x

        for found in each_way(program):
            torch.testing.assert_close(found, REDUCTIONS[op], rtol=1e-15, atol=0)

    def test_an_average_of_integers_drops_the_fraction(self) -> None:
        def program() -> list[int]:
            x = torch.tensor([dist.get_rank(), -3 * dist.get_rank() - 1])
            all_reduce(x, dist.ReduceOp.AVG)
            return x.tolist()

        assert ranks(program, 2) == [[0, -2]] * 2

    @pytest.mark.parametrize(
        ("op", "function"),
        [
            (dist.ReduceOp.BAND, operator.and_),
            (dist.ReduceOp.BOR, operator.or_),
            (dist.ReduceOp.BXOR, operator.xor),
        ],
    )
    def test_bits_are_reduced(self, op: Any, function: Callable[[int, int], int]) -> None:
        given = [0b1101, 0b0111, 0b0101]

        def program() -> int:
            x = torch.tensor([given[dist.get_rank()]])
            all_reduce(x, op)
            return int(x)

        assert ranks(program) == [reduce(function, given)] * 3

    def test_all_reduce_reduces_a_scalar_and_a_complex_tensor(self) -> None:
        def program() -> tuple[int, complex]:
            x, z = torch.tensor(dist.get_rank()), torch.tensor([1j * dist.get_rank() + 1])
            all_reduce(x)
            all_reduce(z)
            return x.item(), z.item()

        assert ranks(program) == [(3, 3 + 3j)] * 3

    @pytest.mark.parametrize("root", range(N))
    def test_reduce_changes_the_root_alone(self, root: int) -> None:
        def program(async_op: bool) -> Tensor:
            x = value(dist.get_rank())
            waited(dist.reduce(x, root, dist.ReduceOp.MAX, async_op=async_op))
            return x

        expected = [REDUCTIONS[dist.ReduceOp.MAX] if rank == root else VALUES[rank] for rank in range(N)]
        torch.testing.assert_close(each_way(program), expected)

    @pytest.mark.parametrize("root", range(N))
    def test_broadcast_gives_every_rank_the_roots(self, root: int) -> None:
        def program(async_op: bool) -> Tensor:
            x = value(dist.get_rank())
            waited(broadcast(x, root, async_op=async_op))
            return x

        torch.testing.assert_close(each_way(program), [VALUES[root]] * N)

    def test_all_gather_into_tensor_concatenates_or_stacks(self) -> None:
        def program(async_op: bool) -> tuple[Tensor, Tensor, Tensor]:
            x = value(dist.get_rank())
            rows, stacked, flat = x.new_empty(6, 2), x.new_empty(3, 2, 2), x.new_empty(12)
            for output in (rows, stacked, flat):
                waited(dist.all_gather_into_tensor(output, x, async_op=async_op))
            return rows, stacked, flat

        stacked = torch.stack(VALUES)
        for found in each_way(program):
            torch.testing.assert_close(found, (stacked.flatten(0, 1), stacked, stacked.flatten()))

    def test_all_gather_fills_a_list_of_equal_or_unequal_tensors(self) -> None:
        def program(async_op: bool) -> tuple[list[Tensor], list[Tensor]]:
            rank = dist.get_rank()
            equal = [torch.zeros(2, 2, dtype=torch.float64) for _ in range(N)]
            uneven = [torch.zeros(other, 2, dtype=torch.float64) for other in range(N)]
            waited(dist.all_gather(equal, value(rank), async_op=async_op))
            waited(dist.all_gather(uneven, value(rank, rank), async_op=async_op))
            return equal, uneven

        for found in each_way(program):
            torch.testing.assert_close(found, (VALUES, [value(rank, rank) for rank in range(N)]))

    def test_all_gather_fills_columns(self) -> None:
        def program() -> Tensor:
            output = torch.zeros(2, N, dtype=torch.long)
            dist.all_gather(list(output.T), torch.tensor([1, 2]) * dist.get_rank())
            return output

        torch.testing.assert_close(ranks(program), [torch.tensor([[0, 1, 2], [0, 2, 4]])] * N)

    def test_reduce_scatter_gives_each_rank_its_share(self) -> None:
        def program(async_op: bool) -> tuple[Tensor, Tensor, Tensor]:
            rank = dist.get_rank()
            x = value(rank, 6)
            rows, listed, uneven = x.new_empty(2, 2), x.new_empty(2, 2), x.new_empty(rank + 1, 2)
            waited(dist.reduce_scatter_tensor(rows, x, async_op=async_op))
            waited(dist.reduce_scatter(listed, list(x.chunk(N)), dist.ReduceOp.MAX, async_op=async_op))
            waited(dist.reduce_scatter(uneven, list(x.split([1, 2, 3])), async_op=async_op))
            return rows, listed, uneven

        every = torch.stack([value(rank, 6) for rank in range(N)])
        total, largest = every.sum(0), every.amax(0)
        expected = [(total.chunk(N)[r], largest.chunk(N)[r], total.split([1, 2, 3])[r]) for r in range(N)]
        torch.testing.assert_close(each_way(program), expected)

    @given(seed=st.integers(0, 2**20), size=st.integers(1, 4))
    @settings(max_examples=15)
    def test_all_to_all_is_a_transpose_of_blocks(self, seed: int, size: int) -> None:
        splits = torch.randint(0, 4, (size, size), generator=torch.Generator().manual_seed(seed)).tolist()
        blocks = [
            [torch.full((splits[src][dst], 2), 10.0 * src + dst) for dst in range(size)]
            for src in range(size)
        ]

        def program() -> None:
            rank = dist.get_rank()
            expected = [blocks[src][rank] for src in range(size)]
            received = [block.shape[0] for block in expected]
            single = torch.zeros(sum(received), 2)
            work = all_to_all_single(single, torch.cat(blocks[rank]), received, splits[rank], async_op=True)
            work.wait()
            listed = [torch.zeros_like(block) for block in expected]
            dist.all_to_all(listed, blocks[rank])
            torch.testing.assert_close(single, torch.cat(expected))
            torch.testing.assert_close(listed, expected)

        ranks(program, size, schedule_seed=seed)

    def test_all_to_all_has_equal_splits_by_default(self) -> None:
        def program(async_op: bool) -> Tensor:
            x = torch.arange(6) + 10 * dist.get_rank()
            output = torch.zeros_like(x)
            waited(all_to_all_single(output, x, async_op=async_op))
            return output

        given = torch.arange(6) + 10 * torch.arange(3).unsqueeze(1)
        expected = list(given.view(3, 3, 2).transpose(0, 1).flatten(1))
        torch.testing.assert_close(each_way(program), expected)

    @pytest.mark.parametrize("root", range(N))
    def test_gather_and_scatter_are_inverse(self, root: int) -> None:
        def program(async_op: bool) -> tuple[list[Tensor] | None, Tensor]:
            rank = dist.get_rank()
            x, back = value(rank), torch.zeros(2, 2, dtype=torch.float64)
            gathered = [torch.zeros_like(x) for _ in range(N)] if rank == root else None
            waited(dist.gather(x, gathered, root, async_op=async_op))
            waited(dist.scatter(back, gathered, root, async_op=async_op))
            return gathered, back

        for rank, (gathered, back) in enumerate(each_way(program)):
            torch.testing.assert_close(gathered, VALUES if rank == root else None)
            torch.testing.assert_close(back, VALUES[rank])

    def test_objects_travel(self) -> None:
        def program() -> tuple[Any, ...]:
            rank = dist.get_rank()
            gathered: list[Any] = [None] * N
            dist.all_gather_object(gathered, {"rank": "x" * (10**rank)})
            told: list[Any] = [("from", rank), rank]
            dist.broadcast_object_list(told, 2)
            on_root: list[Any] | None = [None] * N if rank == 1 else None
            dist.gather_object(rank, on_root, 1)
            given: list[Any] = [None]
            dist.scatter_object_list(given, ["a", ["b"], {"c": 1}] if rank == 0 else None, 0)
            return [len(entry["rank"]) for entry in gathered], told, on_root, given[0]

        told = [("from", 2), 2]
        assert ranks(program) == [
            ([1, 10, 100], told, None, "a"),
            ([1, 10, 100], told, [0, 1, 2], ["b"]),
            ([1, 10, 100], told, None, {"c": 1}),
        ]

    def test_coalesced_calls_are_made_one_by_one(self) -> None:
        def program() -> tuple[Tensor, ...]:
            rank = dist.get_rank()
            a, b, x = value(rank), value(rank, 1), value(rank)
            with dist.distributed_c10d._coalescing_manager():
                all_reduce(a)
                all_reduce(b)
            outputs = x.new_empty(6, 2), x.new_empty(3, 2)
            with dist.distributed_c10d._coalescing_manager(async_ops=True) as pending:
                dist.all_gather_into_tensor(outputs[0], x)
                dist.all_gather_into_tensor(outputs[1], value(rank, 1))
            pending.wait()
            return (a, b, *outputs)

        ones = [value(rank, 1) for rank in range(N)]
        expected = sum(VALUES), sum(ones), torch.cat(VALUES), torch.cat(ones)
        for found in ranks(program):
            torch.testing.assert_close(found, expected)

    def test_inference_tensors_and_leaves_are_written(self) -> None:
        def program() -> list[float]:
            leaf = torch.full((1,), 1.0 + dist.get_rank(), requires_grad=True)
            all_reduce(leaf.data)
            with torch.inference_mode():
                x = torch.ones(1)
                all_reduce(x)
            return [leaf.item(), x.item()]

        assert ranks(program) == [[6.0, 3.0]] * 3


class TestAsync:
    def test_the_output_is_there_after_wait_and_not_before_all_ranks_have_called(self) -> None:
        def program() -> tuple[bool, list[int], list[int]]:
            x = torch.tensor([dist.get_rank()])
            work = all_reduce(x, async_op=True)
            before = x.tolist()
            while not work.is_completed():
                pass
            work.wait()
            work.wait()
            return work.is_completed(), before, work.result()[0].tolist()

        assert ranks(program) == [(True, [rank], [3]) for rank in range(N)]

    def test_a_future_holds_the_outputs(self) -> None:
        def program() -> int:
            x = torch.tensor([dist.get_rank()])
            return int(all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait())

        assert ranks(program) == [6] * 3

    def test_calls_may_be_waited_for_in_another_order(self) -> None:
        def program() -> tuple[list[int], list[int]]:
            a, b = torch.tensor([dist.get_rank()]), torch.tensor([10])
            first, second = all_reduce(a, async_op=True), all_reduce(b, async_op=True)
            for work in (first, second) if dist.get_rank() else (second, first):
                work.wait()
            return a.tolist(), b.tolist()

        assert ranks(program) == [([3], [30])] * 3


class TestMessages:
    def test_send_meets_recv(self) -> None:
        def program() -> list[int]:
            x = torch.tensor([7 + dist.get_rank()])
            if dist.get_rank() == 0:
                dist.send(x, 2)
            elif dist.get_rank() == 2:
                assert dist.recv(x, 0) == 0
            return x.tolist()

        assert ranks(program) == [[7], [8], [7]]

    @pytest.mark.parametrize("batched", [False, True])
    def test_a_ring_of_isend_and_irecv_does_not_deadlock(self, batched: bool) -> None:
        def program() -> list[int]:
            rank, x, y = dist.get_rank(), torch.tensor([dist.get_rank()]), torch.zeros(1, dtype=torch.long)
            after, before = (rank + 1) % N, (rank - 1) % N
            works: Sequence[Any]
            if batched:
                operations = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
                works = dist.batch_isend_irecv(operations)
            else:
                works = [dist.isend(x, after), dist.irecv(y, before)]
            for work in works:
                work.wait()
            return y.tolist()

        for seed in range(3):
            assert ranks(program, schedule_seed=seed) == [[2], [0], [1]]

    def test_messages_are_matched_by_tag(self) -> None:
        def program() -> list[int]:
            found = [torch.zeros(1), torch.zeros(1)]
            if dist.get_rank() == 0:
                works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
            else:
                works = [dist.irecv(found[tag - 1], 0, tag=tag) for tag in (2, 1)]
            for work in works:
                work.wait()
            return [int(x) for x in found]

        assert ranks(program, 2)[1] == [1, 2]
