"""Gradients of the collectives: against autograd of the same computation written down for one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.errors import CommunicationError
from isozyme.parallel import collectives as C
from isozyme.parallel.communicator import Communicator, SingleCommunicator
from isozyme.parallel.simulated import SimulatedWorld, simulate

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4)
Local = Callable[[list[Tensor]], list[Tensor]]
"""What all ranks compute together, as one process sees it: inputs per rank → outputs per rank."""


def rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def loss_of(rank: int, y: Tensor) -> Tensor:
    """A loss that differs between ranks and between elements."""
    weight = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y) + 10 * rank
    return (weight * y * y).sum()


def simulated(
    inputs: Sequence[Tensor], fn: Callable[[Tensor, Communicator], Tensor]
) -> list[tuple[Tensor, Tensor]]:
    def program(world: SimulatedWorld) -> tuple[Tensor, Tensor]:
        x = inputs[world.rank].clone().requires_grad_()
        y = fn(x, world.whole())
        loss_of(world.rank, y).backward()
        assert x.grad is not None
        return y.detach(), x.grad

    return simulate(len(inputs), program)


def one_process(inputs: Sequence[Tensor], fn: Local) -> list[tuple[Tensor, Tensor]]:
    """The same with one graph, whose loss is the sum of the ranks' losses."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = fn(leaves)
    total = sum((loss_of(rank, y) for rank, y in enumerate(outputs)), torch.zeros((), dtype=torch.float64))
    total.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [(y.detach(), grad) for y, grad in zip(outputs, grads, strict=True)]


def assert_same(ours: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> None:
    for (y, grad), (y_expected, grad_expected) in zip(ours, expected, strict=True):
        torch.testing.assert_close(y, y_expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad, grad_expected, rtol=1e-12, atol=1e-12)


@given(sizes=SIZES)
def test_gather_has_the_gradient_of_concatenation(sizes: list[int]) -> None:
    inputs = [rows(n, rank) for rank, n in enumerate(sizes)]
    assert_same(
        simulated(inputs, lambda x, comm: C.gather_from_group(x, comm, sizes)),
        one_process(inputs, lambda xs: [torch.cat(xs)] * len(xs)),
    )


@given(sizes=SIZES)
def test_reduce_scatter_has_the_gradient_of_sum_and_split(sizes: list[int]) -> None:
    inputs = [rows(sum(sizes), rank) for rank in range(len(sizes))]
    assert_same(
        simulated(inputs, lambda x, comm: C.reduce_scatter_to_group(x, comm, sizes)),
        one_process(inputs, lambda xs: list(torch.stack(xs).sum(0).split(sizes))),
    )


@st.composite
def split_matrices(draw: st.DrawFn) -> list[list[int]]:
    size = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    return draw(st.lists(row, min_size=size, max_size=size))


def exchanged(xs: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
    parts = [x.split(count) for x, count in zip(xs, counts, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(xs))]


@given(counts=split_matrices())
def test_all_to_all_has_the_gradient_of_exchanging_parts(counts: list[list[int]]) -> None:
    inputs = [rows(sum(count), rank) for rank, count in enumerate(counts)]

    def ours(x: Tensor, comm: Communicator) -> Tensor:
        return C.all_to_all(x, comm, [count[comm.rank] for count in counts], counts[comm.rank])

    assert_same(simulated(inputs, ours), one_process(inputs, lambda xs: exchanged(xs, counts)))


@given(counts=split_matrices())
def test_all_to_all_in_two_halves_equals_all_to_all(counts: list[list[int]]) -> None:
    inputs = [rows(sum(count), rank) for rank, count in enumerate(counts)]

    def ours(x: Tensor, comm: Communicator) -> Tensor:
        received = [count[comm.rank] for count in counts]
        first = C.all_to_all_start(x, comm, received, counts[comm.rank])
        second = C.all_to_all_start(x * 2, comm, received, counts[comm.rank])
        between = (x * x).sum()
        return C.finish(second) + C.finish(first) + 0 * between

    def expected(xs: list[Tensor]) -> list[Tensor]:
        return [3 * y for y in exchanged(xs, counts)]

    assert_same(simulated(inputs, ours), one_process(inputs, expected))


def test_the_inverse_all_to_all_starts_before_what_was_computed_between_the_halves() -> None:
    """In backward the middle runs while the exchange is under way, as in forward."""

    def program(world: SimulatedWorld) -> list[str]:
        comm, order = world.whole(), []
        x = rows(4, world.rank).requires_grad_()
        y = x * 1
        y.register_hook(lambda grad: order.append("arrived"))
        moving = C.all_to_all_start(y, comm)
        middle = x * 3
        middle.register_hook(lambda grad: order.append("middle"))
        arrived = C.finish(moving)
        arrived.register_hook(lambda grad: order.append("leaves"))
        (arrived * middle).sum().backward()
        return order

    assert simulate(2, program)[0] == ["leaves", "middle", "arrived"]


@given(sizes=SIZES)
def test_copy_and_reduce_are_the_two_ends_of_a_parallel_region(sizes: list[int]) -> None:
    """One replicated x, different work on each rank, one replicated sum, whose loss counts once."""
    size, x = len(sizes), rows(3, 7)

    def work(rank: int, value: Tensor) -> Tensor:
        return value * (rank + 1) + value**2 * sizes[rank]

    def ours(x: Tensor, comm: Communicator) -> Tensor:
        return C.reduce_from_group(work(comm.rank, C.copy_to_group(x, comm)), comm)

    def program(world: SimulatedWorld) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = ours(leaf, world.whole())
        loss_of(0, y).backward()
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    leaf = x.clone().requires_grad_()
    y = torch.stack([work(rank, leaf) for rank in range(size)]).sum(0)
    loss_of(0, y).backward()
    assert leaf.grad is not None
    assert_same(simulate(size, program), [(y.detach(), leaf.grad)] * size)


@given(sizes=SIZES)
def test_split_and_replicated_gather_are_the_two_ends_of_a_sharded_region(sizes: list[int]) -> None:
    size, x = len(sizes), rows(sum(sizes), 3)

    def program(world: SimulatedWorld) -> tuple[Tensor, Tensor]:
        leaf, comm = x.clone().requires_grad_(), world.whole()
        part = C.split_to_group(leaf, comm, sizes)
        y = C.gather_replicated_from_group(part**3, comm, sizes)
        loss_of(0, y).backward()
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    leaf = x.clone().requires_grad_()
    loss_of(0, leaf**3).backward()
    assert leaf.grad is not None
    assert_same(simulate(size, program), [(x**3, leaf.grad)] * size)


def test_a_sequence_parallel_linear_layer_has_the_gradients_of_the_whole() -> None:
    """Gather rows, a column- and a row-parallel weight, scatter the sum (Korthikanti et al., figure 5)."""
    size, x = 3, rows(6, 1)
    up = torch.randn(3, 6, dtype=torch.float64)
    down = torch.randn(6, 3, dtype=torch.float64)

    def program(world: SimulatedWorld) -> tuple[Tensor, Tensor, Tensor]:
        comm, rank = world.whole("tp"), world.rank
        part = x.chunk(size)[rank].clone().requires_grad_()
        a = up.chunk(size, 1)[rank].clone().requires_grad_()
        b = down.chunk(size, 0)[rank].clone().requires_grad_()
        y = C.reduce_scatter_to_group(torch.tanh(C.gather_from_group(part, comm) @ a) @ b, comm)
        weight = torch.arange(1.0, 19.0, dtype=torch.float64).view(6, 3).chunk(size)[rank]
        (weight * y * y).sum().backward()
        assert part.grad is not None
        assert a.grad is not None
        assert b.grad is not None
        return part.grad, a.grad, b.grad

    leaves = [t.clone().requires_grad_() for t in (x, up, down)]
    loss_of(0, torch.tanh(leaves[0] @ leaves[1]) @ leaves[2]).backward()
    for ours, leaf, dim in zip(zip(*simulate(size, program), strict=True), leaves, (0, 1, 0), strict=True):
        torch.testing.assert_close(torch.cat(ours, dim), leaf.grad, rtol=1e-12, atol=1e-12)


ALL: dict[str, Callable[[Tensor, Communicator], Tensor]] = {
    "copy": lambda x, comm: C.copy_to_group(x, comm),
    "reduce": lambda x, comm: C.reduce_from_group(x, comm),
    "gather": lambda x, comm: C.gather_from_group(x, comm, [x.shape[0]] * comm.size),
    "reduce_scatter": lambda x, comm: C.reduce_scatter_to_group(x, comm),
    "split": lambda x, comm: C.split_to_group(x, comm),
    "gather_replicated": lambda x, comm: C.gather_replicated_from_group(x, comm),
    "all_to_all": lambda x, comm: C.all_to_all(x, comm),
    "two_halves": lambda x, comm: C.finish(C.all_to_all_start(x, comm)),
    "gather_halves": lambda x, comm: C.finish(C.gather_from_group_start(x, comm, [x.shape[0]] * comm.size)),
    "reduce_scatter_halves": lambda x, comm: C.finish(C.reduce_scatter_to_group_start(x, comm)),
}


@pytest.mark.parametrize("name", ALL)
def test_a_rank_whose_input_needs_no_gradient_still_takes_part_in_backward(name: str) -> None:
    """A fresh empty tensor on one rank must not silence its backward collective."""

    def program(world: SimulatedWorld) -> None:
        x = torch.zeros(0, 3) if world.rank == 1 else torch.zeros(0, 3, requires_grad=True)
        ALL[name](x, world.whole()).sum().backward()

    _, trace = simulate(3, program, trace=True)
    assert trace.difference() is None


@pytest.mark.parametrize("name", ALL)
def test_without_grad_mode_nothing_is_on_the_graph(name: str) -> None:
    def program(world: SimulatedWorld) -> bool:
        with torch.no_grad():
            return ALL[name](torch.ones(6, 3, requires_grad=True), world.whole()).grad_fn is not None

    assert not any(simulate(3, program))


def test_differentiable_false_keeps_a_gather_off_the_graph() -> None:
    def program(world: SimulatedWorld) -> bool:
        x = torch.ones(2, 3, requires_grad=True)
        return C.gather_from_group(x, world.whole(), differentiable=False).requires_grad

    assert simulate(2, program) == [False, False]


def test_integers_are_exchanged_without_a_graph() -> None:
    def program(world: SimulatedWorld) -> list[int]:
        return C.all_to_all(torch.arange(2) + 10 * world.rank, world.whole()).tolist()

    assert simulate(2, program) == [[0, 10], [1, 11]]


TWICE: dict[str, tuple[Callable[[Tensor, Communicator], Tensor], Local]] = {
    "gather": (ALL["gather"], lambda xs: [torch.cat(xs)] * len(xs)),
    "reduce_scatter": (ALL["reduce_scatter"], lambda xs: list(torch.stack(xs).sum(0).chunk(len(xs)))),
    "all_to_all": (ALL["all_to_all"], lambda xs: exchanged(xs, [[2] * len(xs)] * len(xs))),
}


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_those_of_one_process(name: str) -> None:
    size = 3
    ours, whole = TWICE[name]
    inputs = [rows(2 * size, rank) for rank in range(size)]

    def program(world: SimulatedWorld) -> Tensor:
        leaf = inputs[world.rank].clone().requires_grad_()
        loss = (ours(leaf, world.whole()) ** 3 * (world.rank + 1)).sum()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad((first**2).sum(), leaf)[0]

    leaves = [x.clone().requires_grad_() for x in inputs]
    loss = torch.stack([(y**3 * (rank + 1)).sum() for rank, y in enumerate(whole(leaves))]).sum()
    firsts = torch.autograd.grad(loss, leaves, create_graph=True)
    expected = torch.autograd.grad(torch.stack([(first**2).sum() for first in firsts]).sum(), leaves)
    torch.testing.assert_close(simulate(size, program), list(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("region", ["copy and reduce", "split and gather"])
def test_second_derivatives_of_a_parallel_region_are_those_of_one_process(region: str) -> None:
    size, x = 3, rows(6, 4)

    def parallel(leaf: Tensor, comm: Communicator) -> Tensor:
        if region == "copy and reduce":
            return C.reduce_from_group(C.copy_to_group(leaf, comm) ** (comm.rank + 1), comm)
        return C.gather_replicated_from_group(C.split_to_group(leaf, comm) ** 3, comm)

    def second(leaf: Tensor, y: Tensor) -> Tensor:
        (first,) = torch.autograd.grad((y**2).sum(), leaf, create_graph=True)
        return torch.autograd.grad((first**2).sum(), leaf)[0]

    def program(world: SimulatedWorld) -> Tensor:
        leaf = x.clone().requires_grad_()
        return second(leaf, parallel(leaf, world.whole()))

    leaf = x.clone().requires_grad_()
    powers = torch.stack([leaf ** (rank + 1) for rank in range(size)]).sum(0)
    expected = second(leaf, powers if region == "copy and reduce" else leaf**3)
    torch.testing.assert_close(simulate(size, program), [expected] * size, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_a_group_of_one_rank_is_the_identity(name: str) -> None:
    x = rows(4, 2).requires_grad_()
    y = ALL[name](x, SingleCommunicator())
    torch.testing.assert_close(y, x)
    loss_of(0, y).backward()
    torch.testing.assert_close(x.grad, 2 * x * (torch.arange(1.0, 13.0, dtype=x.dtype).view(4, 3)))


@pytest.mark.parametrize("name", ALL)
def test_the_input_is_left_as_it_was(name: str) -> None:
    def program(world: SimulatedWorld) -> bool:
        x = torch.ones(6, 3) * (world.rank + 1)
        before = x.clone()
        y = ALL[name](x, world.whole())
        with torch.no_grad():
            y += 1
        return torch.equal(x, before) or name == "copy"

    assert all(simulate(3, program))


def test_a_rank_that_leaves_its_result_unused_is_named() -> None:
    """The backward collective needs all ranks: one whose loss does not depend on the result is found."""

    def program(world: SimulatedWorld) -> None:
        x = torch.ones(2, 3, requires_grad=True)
        y = C.gather_from_group(x, world.whole("tp"))
        (y.sum() if world.rank == 0 else x.sum()).backward()

    with pytest.raises(CommunicationError, match=r"rank 0 waits in reduce_scatter(.|\n)*rank 1 has returned"):
        simulate(2, program)


@pytest.mark.parametrize(
    "name", ["reduce_scatter", "split", "all_to_all", "two_halves", "reduce_scatter_halves"]
)
def test_rows_that_do_not_divide_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="5 rows are not divisible by 2 ranks"):
        simulate(2, lambda world: ALL[name](torch.ones(5, 3), world.whole()))


@pytest.mark.parametrize("name", ["gather", "reduce_scatter"])
def test_two_halves_equal_the_whole_in_values_and_gradients(name: str) -> None:
    inputs = [rows(6, rank) for rank in range(3)]
    whole, halves = (simulated(inputs, ALL[each]) for each in (name, f"{name}_halves"))
    assert_same(halves, whole)


def test_an_all_to_all_is_finished_once() -> None:
    moving = C.all_to_all_start(torch.ones(2, 3), SingleCommunicator())
    C.finish(moving)
    with pytest.raises(RuntimeError, match="finished already"):
        C.finish(moving)
