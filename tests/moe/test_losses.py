"""Auxiliary losses against plain loops: values, gradients, padding, splits and scopes."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.errors import ConfigError
from isozyme.moe.losses import balance_loss, expert_counts, window_counts, z_loss

Scope = Literal["sequence", "microbatch", "global_lagged"]


def naive_window_loss(
    shares: Tensor, ids: Tensor, valid: Tensor, lagged: list[float] | None = None
) -> Tensor:
    """E * Σ_e f_e P_e of one window, token by token."""
    experts, topk = shares.shape[1], ids.shape[1]
    real = [t for t in range(len(shares)) if valid[t]]
    total = shares.new_zeros(())
    if not real:
        return total
    for expert in range(experts):
        count = sum(int(ids[t, slot]) == expert for t in real for slot in range(topk))
        fraction = count / (topk * len(real)) if lagged is None else lagged[expert]
        mean = sum((shares[t, expert] for t in real), start=shares.new_zeros(())) / len(real)
        total = total + experts * fraction * mean
    return total


def random_case(
    seed: int, windows: int, length: int, experts: int, topk: int, valid_share: float
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(windows * length, experts, dtype=torch.float64, generator=generator)
    logits[:, 0] += 1.0
    valid = torch.rand(windows * length, generator=generator) < valid_share
    shares = logits.softmax(-1)
    return shares.requires_grad_(), shares.topk(topk).indices, valid


cases = st.builds(
    random_case,
    seed=st.integers(0, 1000),
    windows=st.integers(0, 4),
    length=st.integers(1, 6),
    experts=st.integers(3, 6),
    topk=st.integers(1, 3),
    valid_share=st.sampled_from([0.0, 0.5, 1.0]),
)


def pieces(tensor: Tensor, windows: int) -> list[Tensor]:
    return list(tensor.view(windows, -1, *tensor.shape[1:]).unbind(0)) if windows else []


def check_against(loss: Tensor, expected: Tensor, shares: Tensor) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    if expected.requires_grad:
        (ours,) = torch.autograd.grad(loss, shares)
        (theirs,) = torch.autograd.grad(expected, shares)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_coefficients_of_a_double_precision_loss_are_double_too() -> None:
    shares, ids, valid = random_case(0, 2, 6, 5, 2, 1.0)
    assert shares.dtype == torch.float64
    shares = shares.detach()
    loss = balance_loss(shares, ids, valid, 2, coefficient=0.01)
    parts = zip(pieces(shares, 2), pieces(ids, 2), pieces(valid, 2), strict=True)
    assert float(loss) == pytest.approx(0.01 * sum(float(naive_window_loss(*p)) for p in parts), rel=1e-14)


@given(st.data(), st.integers(0, 4))
def test_sequence_loss_is_the_sum_of_naive_window_losses(data: st.DataObject, windows: int) -> None:
    shares, ids, valid = random_case(
        data.draw(st.integers(0, 999)),
        windows,
        data.draw(st.integers(1, 5)),
        5,
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    loss = balance_loss(shares, ids, valid, windows, coefficient=0.3)
    parts = zip(pieces(shares, windows), pieces(ids, windows), pieces(valid, windows), strict=True)
    check_against(loss, 0.3 * sum((naive_window_loss(*p) for p in parts), start=shares.new_zeros(())), shares)


@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([0.0, 0.4, 1.0]))
def test_microbatch_loss_is_the_naive_loss_of_all_tokens_times_the_filled_windows(
    seed: int, windows: int, share: float
) -> None:
    shares, ids, valid = random_case(seed, windows, 4, 5, 2, share)
    filled = sum(bool(part.any()) for part in pieces(valid, windows))
    loss = balance_loss(shares, ids, valid, windows, coefficient=0.3, scope="microbatch")
    check_against(loss, 0.3 * filled * naive_window_loss(shares, ids, valid), shares)


@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([[5, 0, 2, 1, 0], [0] * 5, None]))
def test_lagged_loss_weighs_each_windows_shares_by_the_counts_of_the_step_before(
    seed: int, windows: int, lagged: list[int] | None
) -> None:
    shares, ids, valid = random_case(seed, windows, 4, 5, 2, 0.5)
    counts = None if lagged is None else torch.tensor(lagged)
    fractions = [c / sum(lagged) for c in lagged] if lagged and sum(lagged) else [0.2] * 5
    loss = balance_loss(
        shares, ids, valid, windows, coefficient=0.3, scope="global_lagged", lagged_counts=counts
    )
    parts = zip(pieces(shares, windows), pieces(ids, windows), pieces(valid, windows), strict=True)
    expected = sum((naive_window_loss(*p, fractions) for p in parts), start=shares.new_zeros(()))
    check_against(loss, 0.3 * expected, shares)


@pytest.mark.parametrize("scope", ["sequence", "microbatch", "global_lagged"])
def test_a_balanced_window_costs_the_coefficient(scope: Scope) -> None:
    shares = torch.full((12, 4), 0.25, dtype=torch.float64)
    ids = torch.tensor([[0, 1], [2, 3]]).repeat(6, 1)
    loss = balance_loss(shares, ids, torch.ones(12, dtype=torch.bool), 3, coefficient=0.5, scope=scope)
    assert loss.item() == pytest.approx(3 * 0.5)


@pytest.mark.parametrize("scope", ["sequence", "microbatch", "global_lagged"])
def test_a_micro_batch_of_padding_costs_exactly_zero_with_a_zero_gradient(scope: Scope) -> None:
    shares, ids, _ = random_case(0, 2, 4, 5, 2, 1.0)
    loss = balance_loss(shares, ids, torch.zeros(8, dtype=torch.bool), 2, coefficient=1.0, scope=scope)
    (gradient,) = torch.autograd.grad(loss, shares)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("scope", ["sequence", "global_lagged"])
@pytest.mark.parametrize("split", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_the_split_into_micro_batches_changes_nothing_in_window_scopes(
    scope: Scope, split: list[int]
) -> None:
    shares, ids, valid = random_case(1, 4, 5, 5, 2, 0.6)
    lagged = torch.tensor([7, 1, 0, 3, 2])
    total, start = shares.new_zeros(()), 0
    for windows in split:
        part = slice(start * 5, (start + windows) * 5)
        total = total + balance_loss(
            shares[part], ids[part], valid[part], windows, coefficient=1.0, scope=scope, lagged_counts=lagged
        )
        start += windows
    check_against(
        total,
        balance_loss(shares, ids, valid, 4, coefficient=1.0, scope=scope, lagged_counts=lagged),
        shares,
    )


def test_the_microbatch_scope_depends_on_the_split_as_documented() -> None:
    shares, ids, valid = random_case(1, 4, 5, 5, 2, 0.6)
    whole = balance_loss(shares, ids, valid, 4, coefficient=1.0, scope="microbatch")
    halves = [
        balance_loss(shares[p], ids[p], valid[p], 2, coefficient=1.0, scope="microbatch")
        for p in (slice(0, 10), slice(10, 20))
    ]
    assert abs((whole - halves[0] - halves[1]).item()) > 1e-4


@pytest.mark.parametrize("scope", ["sequence", "microbatch", "global_lagged"])
def test_appended_padding_changes_nothing_whatever_it_holds(scope: Scope) -> None:
    shares, ids, valid = random_case(2, 2, 4, 5, 2, 0.7)
    padded = torch.full((2, 7, 5), torch.nan, dtype=torch.float64)
    padded[:, :4] = shares.detach().view(2, 4, 5)
    more_ids = torch.ones(2, 7, 2, dtype=torch.int64)
    more_ids[:, :4] = ids.view(2, 4, 2)
    more_valid = torch.zeros(2, 7, dtype=torch.bool)
    more_valid[:, :4] = valid.view(2, 4)
    args = padded.view(14, 5).requires_grad_(), more_ids.view(14, 2), more_valid.view(14), 2
    loss = balance_loss(*args, coefficient=1.0, scope=scope)
    torch.testing.assert_close(
        loss, balance_loss(shares, ids, valid, 2, coefficient=1.0, scope=scope), rtol=1e-13, atol=0
    )
    (gradient,) = torch.autograd.grad(loss, args[0])
    assert torch.equal(gradient.view(2, 7, 5)[:, 4:], torch.zeros(2, 3, 5, dtype=torch.float64))


@given(cases)
def test_counts_of_windows_add_up_to_the_counts_of_real_slots(case: tuple[Tensor, Tensor, Tensor]) -> None:
    shares, ids, valid = case
    windows = 1 if len(ids) else 0
    counts, tokens = window_counts(ids, valid, windows, shares.shape[1])
    expected = [int(((ids == e) & valid[:, None]).sum()) for e in range(shares.shape[1])]
    assert counts.sum(0).tolist() == expected
    assert int(tokens.sum()) == int(valid.sum())
    assert expert_counts(ids, valid[:, None].expand_as(ids), shares.shape[1]).tolist() == expected
    assert counts.dtype == torch.int64


def test_z_loss_sums_squared_logsumexp_over_real_tokens_with_exact_gradients() -> None:
    logits = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    valid = torch.tensor([True, False, True, True, False, True])
    rows = zip(logits.detach(), valid, strict=True)
    expected = sum(float(row.exp().sum().log() ** 2) for row, real in rows if real)
    assert z_loss(logits.logsumexp(-1), valid, coefficient=0.1).item() == pytest.approx(0.1 * expected)
    assert torch.autograd.gradcheck(lambda x: z_loss(x.logsumexp(-1), valid, coefficient=0.1), (logits,))
    nothing = z_loss(logits.logsumexp(-1), torch.zeros(6, dtype=torch.bool), coefficient=0.1)
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert nothing.item() == 0.0
    assert not gradient.any()


def test_tokens_that_are_not_whole_windows_are_refused() -> None:
    shares, ids, valid = random_case(0, 1, 10, 5, 2, 1.0)
    with pytest.raises(ConfigError, match="num_tokens=10, windows=4"):
        balance_loss(shares, ids, valid, 4, coefficient=1.0)
