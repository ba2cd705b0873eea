"""Whole programs of torch.distributed on simulated ranks: groups, meshes, gradients, faults, replay."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch import Tensor
from torch.distributed import all_reduce, all_to_all_single
from torch.distributed.device_mesh import init_device_mesh

from isozyme.core.errors import CommunicationError, UsageError
from isozyme.parallel.distributed import TorchWorld
from isozyme.parallel.simulated import Fault, SimulatedWorld, simulate
from isozyme.parallel.simulated_torch import simulate_torch
from tests.parallel.torch_dispatcher import expert, moe

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def ranks(program: Callable[[], Any], size: int = 3, **options: Any) -> Any:
    return simulate_torch(size, lambda world: program(), **options)


def fails(program: Callable[[], Any], pattern: str, size: int = 2) -> str:
    """The message of the error, found within a second at any schedule, leaving no thread and no world.

    (A first run may import what torch imports late.)
    """
    times = []
    for seed in range(4):
        began, threads = time.perf_counter(), threading.active_count()
        with pytest.raises(CommunicationError, match=pattern) as caught:
            ranks(program, size, schedule_seed=seed)
        times.append(time.perf_counter() - began)
        assert threading.active_count() == threads
        assert not dist.is_initialized()
    assert min(times) < 1
    return str(caught.value)


class TestDispatcher:
    """The layer of torch_dispatcher.py against a loop over tokens."""

    SIZE, TOKENS, HIDDEN, EXPERTS, TOPK = 4, (5, 0, 9, 2), 3, 8, 2

    def case(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
        numbers = torch.Generator().manual_seed(1)
        skew = torch.tensor([8.0, 4, 4, 2, 2, 1, 1, 0])  # the last expert gets nothing
        tokens = [torch.randn(t, self.HIDDEN, dtype=torch.float64, generator=numbers) for t in self.TOKENS]
        ids = [
            torch.multinomial(skew.expand(t, -1), self.TOPK, generator=numbers)
            if t
            else torch.zeros(0, self.TOPK, dtype=torch.long)
            for t in self.TOKENS
        ]
        probs = [torch.rand(t, self.TOPK, dtype=torch.float64, generator=numbers) for t in self.TOKENS]
        shape = (self.EXPERTS, self.HIDDEN, self.HIDDEN)
        return tokens, ids, probs, torch.randn(shape, dtype=torch.float64, generator=numbers)

    def loop(self, tokens: Tensor, ids: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
        """Every expert on every token, times its probability or zero."""
        y = torch.zeros_like(tokens)
        for e, weight in enumerate(weights):
            y = y + expert(tokens, weight) * torch.where(ids == e, probs, 0).sum(1, keepdim=True)
        return y

    def reference(self) -> list[tuple[Tensor, ...]]:
        tokens, ids, probs, weights = self.case()
        for leaf in (*tokens, *probs, weights):
            leaf.requires_grad_()
        outputs = [self.loop(x, i, p, weights) for x, i, p in zip(tokens, ids, probs, strict=True)]
        torch.stack([(y * y).sum() * (rank + 1) for rank, y in enumerate(outputs)]).sum().backward()
        assert weights.grad is not None
        grads = weights.grad.chunk(self.SIZE)
        return [(outputs[r].detach(), tokens[r].grad, probs[r].grad, grads[r]) for r in range(self.SIZE)]  # type: ignore[misc]

    @pytest.mark.parametrize("seed", range(4))
    def test_a_foreign_dispatcher_equals_the_loop_in_values_and_gradients(self, seed: int) -> None:
        def program() -> tuple[Tensor, ...]:
            rank = dist.get_rank()
            tokens, ids, probs, weights = self.case()
            mine = weights.chunk(self.SIZE)[rank].clone().requires_grad_()
            x, p = tokens[rank].requires_grad_(), probs[rank].requires_grad_()
            y = moe(x, ids[rank], p, mine)
            ((y * y).sum() * (rank + 1)).backward()
            return y.detach(), x.grad, p.grad, mine.grad  # type: ignore[return-value]

        found = ranks(program, self.SIZE, schedule_seed=seed)
        torch.testing.assert_close(found, self.reference(), rtol=1e-12, atol=1e-12)

    def test_a_dispatcher_that_skips_an_empty_exchange_is_found(self) -> None:
        def program() -> None:
            rows = torch.ones(3 * (dist.get_rank() > 0), 3)
            if rows.shape[0]:
                all_to_all_single(torch.empty_like(rows), rows)
            dist.barrier()

        message = fails(program, "same collectives in the same order", 3)
        assert "calls all_to_all" in message
        assert "calls barrier" in message


class TestGradients:
    def test_functional_all_to_all_carries_gradients_back(self) -> None:
        def program() -> tuple[Tensor, Tensor]:
            rank = dist.get_rank()
            x = torch.arange(3.0, requires_grad=True)
            y = funcol.all_to_all_single_autograd(x * (rank + 1), [1] * 3, [1] * 3, dist.group.WORLD)
            (y * (10.0 ** torch.arange(3))[rank]).sum().backward()
            return y.detach() + 0, x.grad  # type: ignore[return-value]

        for rank, (y, grad) in enumerate(ranks(program)):
            assert y.tolist() == [rank * (other + 1) for other in range(3)]
            assert grad.tolist() == [(rank + 1) * 10.0**other for other in range(3)]

    def test_functional_gather_and_scatter_are_each_others_backward(self) -> None:
        def program() -> tuple[list[float], ...]:
            rank, world = dist.get_rank(), dist.group.WORLD
            x = torch.tensor([float(rank)], requires_grad=True)
            y = funcol.all_gather_tensor_autograd(x, 0, world)
            (y * torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)).sum().backward()
            z = torch.arange(3.0, requires_grad=True)
            s = funcol.reduce_scatter_tensor_autograd(z * (rank + 1), "sum", 0, world)
            (s * 10.0**rank).sum().backward()
            return y.tolist(), x.grad.tolist(), s.tolist(), z.grad.tolist()  # type: ignore[union-attr]

        for rank, (y, x_grad, s, z_grad) in enumerate(ranks(program)):
            assert y == [0, 1, 2]
            assert x_grad == [6.0 * 2**rank]
            assert s == [6.0 * rank]
            assert z_grad == [(rank + 1) * 10.0**other for other in range(3)]

    def test_functional_collectives_agree_with_the_others(self) -> None:
        def program() -> tuple[list[float], ...]:
            rank, world = dist.get_rank(), dist.group.WORLD
            x = torch.tensor([rank + 1.0])
            group = dist.new_group([0, 2])
            inner = funcol.all_reduce(x, "sum", group).tolist() if rank != 1 else []
            return (
                funcol.all_reduce(x, "max", world).tolist(),
                funcol.all_gather_tensor(x, 0, world).tolist(),
                funcol.broadcast(x, 1, world).tolist(),
                funcol.reduce_scatter_tensor(torch.arange(3.0) * x, "avg", 0, world).tolist(),
                inner,
            )

        found = ranks(program)
        assert found == [([3], [1, 2, 3], [2], [2.0 * r], [] if r == 1 else [4]) for r in range(3)]

    def test_differentiable_functions_of_torch_run_their_collectives_in_backward(self) -> None:
        def program() -> tuple[list[float], ...]:
            rank = dist.get_rank()
            x = torch.tensor([rank + 1.0, 1.0], requires_grad=True)
            (dist_nn.all_reduce(x) * (rank + 1)).sum().backward()
            y = torch.arange(4.0, requires_grad=True)
            splits = [[1, 3], [2, 2]]
            received = [splits[other][rank] for other in range(2)]
            out = dist_nn.all_to_all_single(torch.zeros(sum(received)), y, received, splits[rank])
            (out * (rank + 1)).sum().backward()
            return x.grad.tolist(), y.grad.tolist()  # type: ignore[union-attr]

        found, trace = ranks(program, 2, trace=True)
        assert found == [([3, 3], [1, 2, 2, 2]), ([3, 3], [1, 1, 2, 2])]
        assert trace.kinds(0) == ["all_reduce over world"] * 2 + ["all_to_all over world"] * 2
        assert {Path(record.source.filename).name for record in trace[0]} == {Path(__file__).name}

    def test_a_collective_missing_in_backward_is_found(self) -> None:
        def program() -> None:
            x = torch.ones(2, requires_grad=True)
            y = funcol.all_to_all_single_autograd(x * 1, [1, 1], [1, 1], dist.group.WORLD) + 0
            if dist.get_rank() == 0:
                y.sum().backward()

        message = fails(program, r"rank 0 waits in all_to_all(?s:.*)for rank 1(?s:.*)rank 1 has returned")
        assert "y.sum().backward()" in Path(__file__).read_text().splitlines()[line_of(message) - 1]


def line_of(message: str) -> int:
    found = re.search(re.escape(Path(__file__).name) + r":(\d+)", message)
    assert found is not None
    return int(found[1])


class TestGroups:
    def test_groups_hold_the_ranks_of_their_list(self) -> None:
        def program() -> tuple[Any, ...]:
            rank = dist.get_rank()
            groups = [dist.new_group([2, 0]), dist.new_group([1]), dist.new_group()]
            totals = []
            for group in groups:
                x = torch.tensor([10**rank])
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    all_reduce(x, group=group)
                totals.append(x.item())
            return totals, [dist.get_rank(group) for group in groups], dist.get_world_size(groups[0])

        assert ranks(program) == [
            ([101, 1, 111], [0, -1, 0], 2),
            ([10, 10, 111], [-1, 0, 1], -1),
            ([101, 100, 111], [1, -1, 2], 2),
        ]

    def test_roots_and_peers_are_global_ranks(self) -> None:
        def program() -> list[int]:
            rank, group = dist.get_rank(), dist.new_group([1, 2])
            x, y = torch.tensor([rank]), torch.tensor([-1])
            if rank:
                dist.broadcast(x, src=2, group=group)
                if rank == 2:
                    dist.send(torch.tensor([5]), dst=1, group=group)
                else:
                    dist.recv(y, src=2, group=group)
                assert dist.get_global_rank(group, 0) == 1
                assert dist.get_group_rank(group, 2) == 1
            return [x.item(), y.item()]

        assert ranks(program) == [[0, -1], [2, 5], [2, -1]]

    def test_subgroups_partition_the_world(self) -> None:
        def program() -> tuple[list[int], int, list[int]]:
            mine, _ = dist.new_subgroups(2)
            x = torch.tensor([10 ** dist.get_rank()])
            all_reduce(x, group=mine)
            named, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
            return dist.get_process_group_ranks(mine), x.item(), dist.get_process_group_ranks(named)

        assert ranks(program, 4) == [
            ([0, 1], 11, [0, 3]),
            ([0, 1], 11, [1, 2]),
            ([2, 3], 1100, [1, 2]),
            ([2, 3], 1100, [0, 3]),
        ]

    def test_members_alone_may_build_a_group_with_local_synchronization(self) -> None:
        def program() -> int:
            rank = dist.get_rank()
            x = torch.tensor([rank + 1])
            if rank != 1:
                all_reduce(x, group=dist.new_group([0, 2], use_local_synchronization=True))
            return x.item()

        assert ranks(program) == [4, 2, 4]

    def test_groups_run_independently_and_keep_their_names_in_the_trace(self) -> None:
        def program() -> None:
            rank = dist.get_rank()
            pairs = [dist.new_group([0, 1], group_desc="pair"), dist.new_group([2, 3])]
            for _ in range(1 + 2 * (rank // 2)):  # the second group makes more calls
                all_reduce(torch.ones(1), group=pairs[rank // 2])
            dist.barrier()

        _, trace = ranks(program, 4, trace=True)
        assert trace.kinds(1) == ["all_reduce over pair", "barrier over world"]
        assert trace.kinds(2) == ["all_reduce over group 2"] * 3 + ["barrier over world"]
        assert trace[2][0].ranks == (2, 3)

    def test_groups_may_be_destroyed(self) -> None:
        def program() -> bool:
            group = dist.new_group([0, 1])
            if dist.get_rank() < 2:
                dist.barrier(group)
                dist.destroy_process_group(group)
            dist.barrier()
            dist.destroy_process_group()
            return dist.is_initialized()

        assert ranks(program) == [False] * 3

    def test_groups_that_differ_between_ranks_are_refused(self) -> None:
        def program() -> None:
            rank = dist.get_rank()
            dist.new_group([0, 1] if rank < 2 else [2, 3])

        message = fails(program, "same groups in the same order(?s:.*)Build every group on all ranks", 4)
        assert "[0, 1] on rank" in message
        assert "[2, 3] on rank" in message

    def test_a_group_that_a_rank_does_not_build_is_refused(self) -> None:
        def program() -> None:
            if dist.get_rank() != 1:
                dist.new_group([0, 2])

        fails(program, "every rank must build every group(?s:.*)rank 1 called new_group 0 times", 3)

    @pytest.mark.skipif(TORCH < (2, 13), reason="torch lets the default group build others since 2.13")
    def test_the_backend_that_a_group_asks_for_is_simulated_too(self) -> None:
        def program() -> int:
            x = torch.tensor([dist.get_rank()])
            all_reduce(x, group=dist.new_group(backend="gloo"))
            return x.item()

        assert ranks(program) == [3, 3, 3]

    @pytest.mark.skipif(TORCH >= (2, 13), reason="torch lets the default group build others since 2.13")
    def test_a_group_of_a_real_backend_is_refused(self) -> None:
        fails(lambda: dist.new_group(backend="gloo"), "simulated ranks have no store")


class TestMesh:
    def test_a_mesh_of_one_axis_is_the_world(self) -> None:
        def program() -> int:
            mesh = init_device_mesh("cpu", (3,))
            x = torch.tensor([dist.get_rank()])
            all_reduce(x, group=mesh.get_group())
            return x.item()

        assert ranks(program) == [3, 3, 3]

    def test_the_axes_of_a_mesh_are_rows_and_columns(self) -> None:
        def program() -> tuple[Any, ...]:
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
            x, y = torch.tensor([10 ** dist.get_rank()]), torch.tensor([10 ** dist.get_rank()])
            all_reduce(x, group=mesh["tp"].get_group())
            y = funcol.all_reduce(y, "sum", (mesh, 0)) + 0
            return list(mesh.get_coordinate() or ()), x.item(), y.item()

        found, trace = ranks(program, 6, trace=True)
        assert found == [
            ([rank // 3, rank % 3], 111 * 1000 ** (rank // 3), 1001 * 10 ** (rank % 3)) for rank in range(6)
        ]
        assert trace.kinds(4) == ["all_reduce over mesh_tp", "all_reduce over mesh_dp"]


class TestFaults:
    def test_splits_that_do_not_match_name_both_ranks_and_lines(self) -> None:
        def program() -> None:
            rank = dist.get_rank()
            if rank == 0:
                all_to_all_single(torch.zeros(3, 4), torch.zeros(3, 4), [1, 2], [1, 2])
            else:
                all_to_all_single(torch.zeros(4, 4), torch.zeros(5, 4), [1, 3], [2, 3])

        message = fails(program, "rank 0 sends 2 to rank 1 .*which expects 1")
        assert len(set(re.findall(re.escape(Path(__file__).name) + r":\d+", message))) == 2
        assert "rank 0 calls all_to_all((3, 4) float32, input_sizes=[1, 2]" in message
        assert "rank 1 calls all_to_all((5, 4) float32" in message

    def test_different_collectives_name_both_ranks(self) -> None:
        def program() -> None:
            if dist.get_rank():
                all_reduce(torch.ones(2))
            else:
                dist.broadcast(torch.ones(2), 0)

        message = fails(program, "same collectives in the same order")
        assert "rank 0 calls broadcast((2,) float32, peer=0) at tests" in message
        assert "rank 1 calls all_reduce((2,) float32, sum) at tests" in message

    @pytest.mark.parametrize(
        ("program", "pattern"),
        [
            (lambda r: all_reduce(torch.ones(2 + r)), "agree on the shape"),
            (lambda r: all_reduce(torch.ones(2, dtype=(torch.float, torch.double)[r])), "agree on the dtype"),
            (lambda r: all_reduce(torch.ones(2), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[r]), "the operation"),
            (lambda r: dist.broadcast(torch.ones(2), r), "agree on the root"),
            (lambda r: dist.reduce(torch.ones(2), r), "agree on the root"),
            (lambda r: dist.gather(torch.ones(2 + r), [torch.ones(2)] * 2 if r == 0 else None), "the shape"),
            (lambda r: dist.scatter(torch.ones(2), [torch.ones(2), torch.ones(3)] if r == 0 else None),
             "rank 0 sends 3 to rank 1"),
            (lambda r: dist.all_gather_into_tensor(torch.ones(4 + 2 * r), torch.ones(2 + r)), "the sizes"),
            (lambda r: dist.recv(torch.ones(2), 0) if r else dist.send(torch.ones(3), 1), "on the shape"),
            (lambda r: dist.recv(torch.ones(2), 0, tag=1) if r else dist.send(torch.ones(2), 1), "deadlock"),
            (lambda r: dist.send(torch.ones(2), 1 - r), "deadlock"),
            (lambda r: r or dist.barrier(), "rank 0 waits in barrier(?s:.*)rank 1 has returned"),
            (lambda r: all_reduce(torch.ones(2), async_op=True) and None, "must be waited for"),
            (lambda r: dist.recv(torch.ones(2)), "must name its source"),
            (lambda r: dist.distributed_c10d._get_default_store().set("a", "b"), "have no store"),
        ],
    )  # fmt: skip
    def test_disagreements_are_errors(self, program: Callable[[int], Any], pattern: str) -> None:
        fails(lambda: program(dist.get_rank()), pattern)

    @pytest.mark.parametrize(
        ("program", "pattern"),
        [
            (lambda: all_to_all_single(torch.ones(3), torch.ones(3)), "3 rows % 2 ranks .* must be 0"),
            (lambda: all_to_all_single(torch.ones(2), torch.ones(2), [1, 2], [1, 1]), "must be 2, not 3"),
            (lambda: all_to_all_single(torch.ones(2).long(), torch.ones(2)), "dtype"),
            (lambda: all_reduce(torch.ones(2, 3).T), "contiguous"),
            (lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)), "must be 4, not 3"),
            (lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2)), "must be 4, not 2"),
        ],
    )
    def test_a_call_that_does_not_fit_itself_is_refused(
        self, program: Callable[[], Any], pattern: str
    ) -> None:
        with pytest.raises(ValueError, match=pattern):
            ranks(program, 2)

    def test_a_buffer_that_changes_under_way_is_found(self) -> None:
        def program() -> None:
            x = torch.ones(2)
            work = all_reduce(x, async_op=True)
            x.add_(1)
            work.wait()

        fails(program, "must not change while it is being sent")

    def test_polling_for_what_never_comes_ends(self) -> None:
        def program() -> None:
            if dist.get_rank() == 0:
                work = all_reduce(torch.ones(1), async_op=True)
                while not work.is_completed():
                    pass

        with pytest.raises(CommunicationError, match="polled 10000 times"):
            ranks(program, 2)

    def test_the_exception_of_a_rank_is_raised_as_it_is(self) -> None:
        class MineError(Exception):
            pass

        def program() -> None:
            if dist.get_rank() == 1:
                raise MineError
            x = torch.ones(2, requires_grad=True)
            funcol.all_to_all_single_autograd(x, [1, 1], [1, 1], dist.group.WORLD).sum().backward()

        with pytest.raises(MineError):
            ranks(program, 2)

    def test_faults_can_be_put_in(self) -> None:
        with pytest.raises(OSError, match="cable"):
            ranks(
                lambda: [all_reduce(torch.ones(1)) for _ in range(3)], faults=[Fault(1, 2, OSError("cable"))]
            )


class TestReplay:
    def test_a_seed_replays_the_order_and_the_random_numbers(self) -> None:
        def run(seed: int) -> tuple[list[Any], Any]:
            order: list[int] = []

            def program() -> list[float]:
                found = []
                for _ in range(4):
                    order.append(dist.get_rank())
                    x = torch.rand(1)
                    all_reduce(x)
                    found.append(x.item())
                return found

            return order, ranks(program, 4, schedule_seed=seed)

        assert run(3) == run(3)
        assert run(3)[0] != run(4)[0]
        assert run(3)[1] == run(4)[1]

    def test_the_schedule_can_be_given(self) -> None:
        order: list[int] = []

        def program() -> None:
            order.append(dist.get_rank())
            dist.barrier()

        ranks(program, schedule=max)
        assert order == [2, 1, 0]


class TestBothForms:
    def test_communicators_and_torch_share_one_world(self) -> None:
        def program(world: SimulatedWorld) -> int:
            x = torch.tensor([world.rank])
            all_reduce(x)
            return int(world.whole("ep").all_reduce(x))

        found, trace = simulate_torch(3, program, trace=True)
        assert found == [9, 9, 9]
        assert trace.kinds(0) == ["all_reduce over world", "all_reduce over ep"]

    def test_the_real_transport_agrees_with_the_simulated_one(self) -> None:
        def calls(world: Any) -> list[Any]:
            comm, rank = world.split("ep", [(0, 2), (1, 3)]), world.rank
            x = torch.arange(6.0).view(3, 2) + 100 * rank
            return [
                comm.all_reduce(x.clone(), "max"),
                comm.all_gather(x[: 1 + rank // 2], [1, 2]),
                comm.reduce_scatter(x, [1, 2]),
                comm.all_to_all(x, [[1, 2], [2, 1]][comm.rank], [[1, 2], [2, 1]][comm.rank]),
                comm.broadcast(x.clone(), 1),
                comm.exchange([(x, 1 - comm.rank)], [(torch.zeros(3, 2), 1 - comm.rank)]),
                comm.all_gather_object({"rank": rank}),
            ]

        ours = simulate(4, calls)
        through_torch = simulate_torch(4, lambda _: calls(TorchWorld()))
        torch.testing.assert_close(through_torch, ours)


class TestSurroundings:
    def test_nothing_is_left_behind(self, tmp_path: Path) -> None:
        c10d = dist.distributed_c10d
        before = c10d._world, list(c10d.Backend.backend_list), dict(c10d.Backend._plugins), sys.excepthook
        ranks(lambda: dist.new_group([0]) and None)
        with pytest.raises(ZeroDivisionError):
            ranks(lambda: 1 / dist.get_world_size() - 1 / 3 or 1 / 0)
        after = c10d._world, list(c10d.Backend.backend_list), dict(c10d.Backend._plugins), sys.excepthook
        assert after == before
        assert not hasattr(c10d.Backend, "SIMULATED")
        assert not dist.is_initialized()
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
        try:
            x = torch.ones(2)
            all_reduce(x, group=dist.new_group([0]))
            assert (funcol.all_reduce(x, "sum", dist.group.WORLD) + 0).tolist() == [1, 1]
            with pytest.raises(UsageError, match="backend=gloo, world_size=1"):
                ranks(dist.get_rank)
            assert dist.get_world_size() == 1
        finally:
            dist.destroy_process_group()
        assert ranks(dist.get_rank) == [0, 1, 2]

    def test_other_threads_do_not_see_the_simulated_world(self) -> None:
        def program() -> bool:
            seen: list[bool] = []
            thread = threading.Thread(target=lambda: seen.append(dist.is_initialized()))
            thread.start()
            thread.join()
            return seen[0]

        assert ranks(program) == [False] * 3

    def test_a_rank_cannot_simulate(self) -> None:
        fails(lambda: ranks(dist.get_rank), "cannot simulate a world")


class TestLibraries:
    """What torch builds on its process groups runs as well."""

    @staticmethod
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
        return torch.nn.Sequential(*layers).double()

    @staticmethod
    def loss(model: torch.nn.Module, rank: int) -> Tensor:
        return model(value_of(rank)).square().sum()

    def expected(self) -> list[Tensor]:
        model = self.model()
        (sum(self.loss(model, rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    def test_distributed_data_parallel_averages_gradients(self) -> None:
        def program() -> list[Any]:
            model = torch.nn.parallel.DistributedDataParallel(self.model())
            self.loss(model, dist.get_rank()).backward()
            return [parameter.grad for parameter in model.parameters()]

        torch.testing.assert_close(ranks(program, 2), [self.expected()] * 2)

    @pytest.mark.skipif(TORCH < (2, 13), reason="DTensor of torch 2.11 crashes in any thread that ends")
    def test_fully_sharded_parameters_average_gradients(self) -> None:
        from torch.distributed.fsdp import fully_shard

        def program() -> list[Any]:
            model = self.model()
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
            self.loss(model, dist.get_rank()).backward()
            return [parameter.grad.full_tensor() for parameter in model.parameters()]

        torch.testing.assert_close(ranks(program, 2), [self.expected()] * 2)


def value_of(rank: int) -> Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3) * (rank + 1) / 4 - rank
