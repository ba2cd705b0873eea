"""Tensor-parallel functions against the same on whole tensors, in values and in every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.errors import ConfigError
from isozyme.parallel.communicator import Communicator, SingleCommunicator
from isozyme.parallel.simulated import SimulatedWorld, simulate
from isozyme.parallel.tensor import (
    column_parallel_linear,
    from_sequence,
    gather_tokens,
    row_parallel_linear,
    scatter_sum,
    sequence_part,
    to_sequence,
    vocabulary_parallel_embedding,
    vocabulary_rows,
)

SIZES = (1, 2, 4)
TOKENS, WIDTH, FFN = 3, 6, 8
"""Tokens of each rank; features outside and inside, over all ranks."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _part(x: Tensor, group: Communicator, dim: int = 0) -> Tensor:
    """This rank's share of a whole tensor, as a leaf."""
    return x.chunk(group.size, dim=dim)[group.rank].clone().requires_grad_()


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def _equal(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def _on(size: int, program: Callable[[Communicator], None]) -> None:
    simulate(size, lambda world: program(world.whole("tp")), schedule_seed=size)


@pytest.mark.parametrize("size", SIZES)
def test_column_parallel_equals_its_slow_twin_bit_for_bit_forward_and_in_every_gradient(size: int) -> None:
    """Two weights of unlike width; each rank gets its own upstream gradient."""
    x = _random(size * TOKENS, 2, WIDTH)
    weights = [_random(size * 4, WIDTH, seed=1), _random(size * 2, WIDTH, seed=2)]

    def program(group: Communicator) -> None:
        fast, slow = _part(x, group), _part(x, group)
        mine, theirs = ([_part(w, group) for w in weights] for _ in range(2))
        ours = column_parallel_linear(fast, mine, group)
        gathered = gather_tokens(slow, group)
        twin = [F.linear(gathered, w) for w in theirs]
        grads = [_random(*y.shape, seed=10 + group.rank) for y in twin]
        for one, other in zip(ours, twin, strict=True):
            assert torch.equal(one, other)
        torch.autograd.backward(ours, grads)
        torch.autograd.backward(twin, grads)
        for one, other in zip([fast, *mine], [slow, *theirs], strict=True):
            assert other.grad is not None
            _equal(one.grad, other.grad)

    _on(size, program)


@pytest.mark.parametrize("size", SIZES)
def test_a_column_and_a_row_parallel_map_make_the_whole_network(size: int) -> None:
    x, up, down = _random(size * TOKENS, WIDTH), _random(FFN, WIDTH, seed=1), _random(WIDTH, FFN, seed=2)
    upstream = _random(size * TOKENS, WIDTH, seed=3)
    whole = [_leaf(x), _leaf(up), _leaf(down)]
    expected = F.linear(F.silu(F.linear(whole[0], whole[1])), whole[2])
    expected.backward(upstream)

    def program(group: Communicator) -> None:
        parts = [_part(x, group), _part(up, group), _part(down, group, dim=1)]
        (inner,) = column_parallel_linear(parts[0], (parts[1],), group)
        found = row_parallel_linear(F.silu(inner), parts[2], group)
        _equal(found.detach(), expected.detach().chunk(size)[group.rank])
        found.backward(upstream.chunk(size)[group.rank])
        for part, tensor, dim in zip(parts, whole, (0, 0, 1), strict=True):
            assert tensor.grad is not None
            _equal(part.grad, tensor.grad.chunk(size, dim=dim)[group.rank])

    _on(size, program)


@pytest.mark.parametrize("frozen", ["input", "one weight"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_unchanged(frozen: str) -> None:
    x, one, two = _random(2 * TOKENS, WIDTH), _random(4, WIDTH, seed=1), _random(8, WIDTH, seed=2)

    def program(group: Communicator) -> None:
        def gradients(freeze: bool) -> list[Tensor | None]:
            parts = [_part(t, group) for t in (x, one, two)]
            parts[0 if frozen == "input" else 1].requires_grad_(not freeze)
            sum(y.square().sum() for y in column_parallel_linear(parts[0], parts[1:], group)).backward()
            return [part.grad for part in parts]

        for kept, full in zip(gradients(True), gradients(False), strict=True):
            assert full is not None
            assert kept is None or torch.equal(kept, full)

    _on(2, program)


@pytest.mark.parametrize("size", SIZES)
def test_an_embedding_cut_over_ranks_gives_the_vectors_and_gradients_of_the_whole(size: int) -> None:
    ids = torch.tensor([[0, 7, 3, 3], [5, 1, 7, 2], [4, 6, 0, 3], [3, 3, 1, 0]])[: max(size, 2)]
    table = _leaf(_random(8, WIDTH))
    upstream = _random(*ids.shape, WIDTH, seed=3)
    expected = F.embedding(ids, table)
    expected.backward(upstream)
    assert table.grad is not None

    def program(group: Communicator) -> None:
        mine = _part(table.detach(), group)
        found = vocabulary_parallel_embedding(ids, mine, group)
        assert torch.equal(found, expected.detach().chunk(size)[group.rank])
        found.backward(upstream.chunk(size)[group.rank])
        assert table.grad is not None
        _equal(mine.grad, table.grad.chunk(size)[group.rank])

    _on(size, program)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_id_outside_of_the_vocabulary_fails_as_in_a_whole_table(wrong: int) -> None:
    ids = torch.tensor([0, wrong])
    with pytest.raises(IndexError):
        _on(2, lambda group: vocabulary_parallel_embedding(ids, _part(_random(8, 2), group), group))


@settings(max_examples=20)
@given(size=st.sampled_from(SIZES), ids=st.lists(st.integers(-20, 20), max_size=30))
def test_every_id_is_looked_up_by_exactly_one_rank(size: int, ids: list[int]) -> None:
    found = torch.tensor(ids, dtype=torch.long)

    def program(world: SimulatedWorld) -> Tensor:
        group = world.whole("tp")
        rows, mine = vocabulary_rows(found, 3, group)
        inside = (found >= 3 * group.rank) & (found < 3 * group.rank + 3)
        assert mine[inside].all()
        assert torch.equal(rows + 3 * group.rank, found)
        return mine

    owners = torch.stack(simulate(size, program)).sum(0)
    assert (owners == 1).all()


@settings(max_examples=20)
@given(
    size=st.sampled_from(SIZES),
    windows=st.integers(1, 3),
    length=st.integers(1, 3),
    rest=st.sampled_from([(), (2,), (2, 3)]),
)
def test_parts_gathered_rank_by_rank_become_whole_windows_and_back(
    size: int, windows: int, length: int, rest: tuple[int, ...]
) -> None:
    whole = _random(windows, size * length, *rest)

    def program(group: Communicator) -> None:
        part = sequence_part(whole, group)
        assert part.shape == (windows, length, *rest)
        gathered = gather_tokens(part, group)
        assert torch.equal(to_sequence(gathered, group), whole)
        assert torch.equal(from_sequence(whole, group), gathered)

    _on(size, program)


def test_a_window_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 % 2 = 1\. Choose tp from 1, 5"):
        _on(2, lambda group: sequence_part(torch.zeros(2, 5), group))


def test_gather_and_scatter_are_each_other_s_backward() -> None:
    """<scatter_sum(y), x> over all ranks equals <y, gather_tokens(x)>, and so does each one's gradient."""
    xs = [_random(TOKENS, 2, seed=rank) for rank in range(4)]
    ys = [_random(4 * TOKENS, 2, seed=10 + rank) for rank in range(4)]

    def program(world: SimulatedWorld) -> tuple[float, float]:
        group = world.whole("tp")
        x, y = _leaf(xs[group.rank]), _leaf(ys[group.rank])
        scattered, gathered = scatter_sum(y, group), gather_tokens(x, group)
        scattered.backward(x.detach())
        gathered.backward(y.detach())
        _equal(y.grad, gathered.detach())
        _equal(x.grad, scattered.detach())
        return float((scattered * x).sum().detach()), float((gathered * y).sum().detach())

    left, right = (sum(values) for values in zip(*simulate(4, program), strict=True))
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_those_of_the_docstrings(size: int) -> None:
    x, weight, table = _random(size * TOKENS, WIDTH), _random(FFN, WIDTH, seed=1), _random(8, WIDTH, seed=2)
    n = TOKENS * WIDTH * 8
    ids = torch.arange(size * TOKENS) % 8

    def sent(program: Callable[[Communicator], Tensor], backward: bool) -> set[int]:
        def rank(world: SimulatedWorld) -> None:
            result = program(world.whole("tp"))
            if backward:
                result.sum().backward()

        _, trace = simulate(size, rank, trace=True)
        assert trace.difference() is None
        return {trace.bytes_by_group(rank).get("tp", 0) for rank in range(size)}

    def column(group: Communicator) -> Tensor:
        weights = [_part(weight, group) for _ in range(3)]
        return torch.cat(column_parallel_linear(_part(x, group), weights, group))

    def row(group: Communicator) -> Tensor:
        features = _random(size * TOKENS, FFN // size).requires_grad_()
        return row_parallel_linear(features, _part(weight.T, group, dim=1), group)

    def embedding(group: Communicator) -> Tensor:
        return vocabulary_parallel_embedding(ids, _part(table, group), group)

    assert sent(column, False) == {n * (size - 1)}
    assert sent(column, True) == {3 * n * (size - 1)}
    for each in (row, embedding):
        assert sent(each, False) == {n * (size - 1)}
        assert sent(each, True) == {2 * n * (size - 1)}


def test_a_group_of_one_rank_copies_and_sends_nothing() -> None:
    alone, x = SingleCommunicator(), _random(TOKENS, WIDTH)
    assert gather_tokens(x, alone) is x
    assert scatter_sum(x, alone) is x


def test_gathered_tokens_are_not_kept_for_backward() -> None:
    x, weight = _random(4 * TOKENS, WIDTH), _random(FFN, WIDTH, seed=1)

    def program(group: Communicator) -> None:
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape[0]) or t, lambda t: t):
            column_parallel_linear(_part(x, group), (_part(weight, group),), group)
        assert sorted(kept) == [FFN // 4, TOKENS]

    _on(4, program)
