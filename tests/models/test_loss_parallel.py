"""The cross-entropy of a vocabulary cut over ranks against torch's over all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from isozyme.models.loss import cross_entropy_sum
from isozyme.parallel.communicator import Communicator
from isozyme.parallel.simulated import SimulatedWorld, simulate
from isozyme.parallel.tensor import gather_tokens

WIDTH = 6


def _case(tokens: int, vocab: int, seed: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator) * scale
    weight = torch.randn(vocab, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    return hidden, weight, labels, torch.rand(tokens, generator=generator) < 0.6


def _sharded(
    group: Communicator, case: tuple[Tensor, Tensor, Tensor, Tensor], chunk_elements: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and this rank's parts of the hidden states and the head, with gradients."""
    hidden, weight, labels, valid = case
    mine = hidden.chunk(group.size)[group.rank].clone().requires_grad_()
    rows = weight.chunk(group.size)[group.rank].clone().requires_grad_()
    loss = cross_entropy_sum(
        gather_tokens(mine, group), rows, labels, valid, group=group, chunk_elements=chunk_elements
    )
    (loss * 0.37).backward()
    return loss.detach(), mine, rows


@settings(max_examples=40)
@given(
    size=st.sampled_from((2, 4)),
    per_rank=st.integers(1, 5),
    ids=st.integers(1, 4),
    chunk_elements=st.integers(1, 30),
    scale=st.sampled_from((0.1, 3.0, 300.0)),
    seed=st.integers(0, 2**32),
)
def test_value_and_gradients_equal_those_of_all_logits_at_every_chunk_size(
    size: int, per_rank: int, ids: int, chunk_elements: int, scale: float, seed: int
) -> None:
    hidden, weight, labels, valid = _case(size * per_rank, size * ids, seed, scale)
    target = labels.masked_fill(~valid, -100)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = F.cross_entropy(leaves[0] @ leaves[1].T, target, ignore_index=-100, reduction="sum")
    (expected * 0.37).backward()
    given_labels = labels.masked_fill(~valid, -1_000_000)  # any value where it does not count

    def program(world: SimulatedWorld) -> None:
        group = world.whole("tp")
        loss, mine, rows = _sharded(group, (hidden, weight, given_labels, valid), chunk_elements)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        for part, whole in zip((mine, rows), leaves, strict=True):
            assert whole.grad is not None
            torch.testing.assert_close(
                part.grad, whole.grad.chunk(size)[group.rank], rtol=1e-11, atol=1e-11 * scale
            )

    simulate(size, program)


def test_every_rank_gets_the_same_bits() -> None:
    case = _case(8, 8, 1)
    losses = simulate(4, lambda world: _sharded(world.whole("tp"), case, 7)[0].item())
    assert len(set(losses)) == 1


@pytest.mark.parametrize("chunk_elements", [4, 10_000])
def test_two_reductions_of_at_least_fp32_whatever_the_chunks_and_none_in_backward(
    chunk_elements: int,
) -> None:
    hidden, weight, labels, valid = _case(8, 12, 2)
    small, rows = hidden.bfloat16(), weight.bfloat16()

    def program(world: SimulatedWorld) -> None:
        group = world.whole("tp")
        mine = rows.chunk(4)[group.rank].clone().requires_grad_()
        loss = cross_entropy_sum(small, mine, labels, valid, group=group, chunk_elements=chunk_elements)
        assert loss.dtype == torch.float32
        loss.backward()
        assert mine.grad is not None
        assert mine.grad.dtype == torch.bfloat16

    _, trace = simulate(4, program, trace=True)
    for records in trace:
        assert [(r.kind, r.shape, r.dtype) for r in records] == [
            ("all_reduce", (8,), torch.float32),
            ("all_reduce", (2, 8), torch.float32),
        ]


def test_no_rank_ever_holds_all_logits_of_all_ids_or_of_all_tokens() -> None:
    tokens, vocab, size, at_once = 64, 32, 4, 40
    case = _case(tokens, vocab, 3)
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, (tuple, list)) else (out,):
                is_logits = isinstance(each, Tensor) and each.shape[1:] == (vocab // size,)
                if is_logits and each.shape[0] != WIDTH:  # the weight, transposed
                    largest[0] = max(largest[0], each.numel())
            return out

    def program(world: SimulatedWorld) -> None:
        with Watch():
            _sharded(world.whole("tp"), case, at_once)

    simulate(size, program)
    assert 0 < largest[0] <= at_once


def test_ids_without_any_probability_on_one_rank_do_not_spoil_the_others() -> None:
    hidden = torch.ones(2, 1, dtype=torch.float64)
    weight = torch.tensor([[0.0], [1.0], [-torch.inf], [-torch.inf]], dtype=torch.float64)
    labels, valid = torch.tensor([0, 1]), torch.tensor([True, True])
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")

    def program(world: SimulatedWorld) -> float:
        group = world.whole("tp")
        return float(cross_entropy_sum(hidden, weight.chunk(2)[group.rank], labels, valid, group=group))

    assert simulate(2, program) == pytest.approx([float(expected)] * 2, rel=1e-12)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_a_valid_label_outside_of_the_vocabulary_fails_as_on_one_rank(wrong: int) -> None:
    hidden, weight, labels, valid = _case(4, 8, 4)
    labels[1], valid[:] = wrong, True

    def program(world: SimulatedWorld) -> None:
        group = world.whole("tp")
        cross_entropy_sum(hidden, weight.chunk(2)[group.rank], labels, valid, group=group)

    with pytest.raises(RuntimeError, match="out of bounds"):
        simulate(2, program)


def test_without_a_valid_label_loss_and_gradients_are_zero_even_for_nan() -> None:
    hidden, weight, labels, valid = _case(4, 8, 5)
    case = (hidden.fill_(float("nan")), weight, labels, torch.zeros_like(valid))

    def program(world: SimulatedWorld) -> None:
        loss, mine, rows = _sharded(world.whole("tp"), case, 10)
        assert loss.item() == 0.0
        assert mine.grad is not None
        assert rows.grad is not None
        assert not mine.grad.any()
        assert not rows.grad.any()

    simulate(2, program)
