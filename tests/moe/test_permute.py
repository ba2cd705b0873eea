"""Permutation against naive loops: values, gradients, order, drops, padding and chunks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.moe.permute import (
    permute,
    permute_probs,
    sort_slots,
    unpermute,
)
from isozyme.moe.types import Routing


@st.composite
def routings(draw: st.DrawFn, max_tokens: int = 9) -> Routing:
    """Skewed routing with distinct weights and random drops; T may be 0, and K may be E."""
    experts = draw(st.integers(1, 5))
    topk = draw(st.integers(1, experts))
    tokens = draw(st.integers(0, max_tokens))
    order = st.permutations(range(experts)).map(lambda ids: ids[:topk])
    ids = draw(st.lists(order, min_size=tokens, max_size=tokens))
    kept = draw(st.lists(st.booleans(), min_size=tokens * topk, max_size=tokens * topk))
    return make_routing(ids, experts, topk, kept)


def make_routing(ids: list[list[int]], experts: int, topk: int, kept: list[bool] | None = None) -> Routing:
    tokens = len(ids)
    flags = torch.tensor([True] * (tokens * topk) if kept is None else kept, dtype=torch.bool)
    return Routing(
        topk_ids=torch.tensor(ids, dtype=torch.int64).view(tokens, topk),
        topk_probs=(torch.arange(tokens * topk, dtype=torch.float64).view(tokens, topk) + 1) / 7,
        kept=flags.view(tokens, topk),
        num_experts=experts,
    )


def naive_rows(routing: Routing) -> list[tuple[int, int]]:
    """(token, choice) of each row, by three plain loops."""
    return [
        (token, choice)
        for expert in range(routing.num_experts)
        for token in range(routing.num_tokens)
        for choice in range(routing.topk)
        if routing.kept[token, choice] and routing.topk_ids[token, choice] == expert
    ]


def coded(rows: int, columns: int = 3) -> Tensor:
    """Row r, column c holds 10 r + c: no two elements are equal."""
    return (torch.arange(rows)[:, None] * 10 + torch.arange(columns)).double().requires_grad_()


@given(routings())
def test_slots_are_sorted_by_expert_then_token_then_choice_and_drops_shift_nothing(routing: Routing) -> None:
    slots, expected = sort_slots(routing), naive_rows(routing)
    assert slots.row_token.tolist() == [token for token, _ in expected]
    assert slots.row_slot.tolist() == [token * routing.topk + choice for token, choice in expected]
    assert slots.counts.tolist() == [
        int(((routing.topk_ids == e) & routing.kept).sum()) for e in range(routing.num_experts)
    ]
    for (token, choice), row in zip(expected, range(len(expected)), strict=True):
        assert slots.slot_row[token, choice] == row
    assert (slots.slot_row == -1).equal(~routing.kept)


@given(routings())
def test_index_tables_are_int64(routing: Routing) -> None:
    slots = sort_slots(routing)
    for table in (slots.row_token, slots.row_slot, slots.slot_row, slots.counts):
        assert table.dtype == torch.int64


@given(routings())
def test_permute_copies_tokens_and_its_gradient_adds_up_their_rows(routing: Routing) -> None:
    tokens, expected = coded(routing.num_tokens), naive_rows(routing)
    slots = sort_slots(routing)
    rows = permute(tokens, slots)
    assert rows.equal(tokens.detach()[[t for t, _ in expected]].view(-1, 3))
    weight = coded(len(expected)).detach()
    (rows * weight).sum().backward()
    want = torch.zeros(routing.num_tokens, 3, dtype=torch.float64)
    for (token, _), row in zip(expected, weight, strict=True):
        want[token] += row
    assert tokens.grad is not None
    assert tokens.grad.equal(want)


@given(routings())
def test_unpermute_inverts_permute(routing: Routing) -> None:
    tokens, slots = coded(routing.num_tokens), sort_slots(routing)
    copies = routing.kept.sum(1, keepdim=True)
    assert unpermute(permute(tokens, slots), slots).equal(tokens * copies)


@given(routings())
def test_probabilities_follow_their_rows_and_take_their_gradients(routing: Routing) -> None:
    probs = routing.topk_probs.clone().requires_grad_()
    slots, expected = sort_slots(routing), naive_rows(routing)
    rows = permute_probs(probs, slots)
    assert rows.tolist() == [float(routing.topk_probs[at]) for at in expected]
    weight = torch.arange(len(expected)).double() + 1
    (rows * weight).sum().backward()
    want = torch.zeros_like(routing.topk_probs)
    for at, value in zip(expected, weight, strict=True):
        want[at] = value
    assert probs.grad is not None
    assert probs.grad.equal(want)


@given(routings(max_tokens=5))
def test_gradients_match_finite_differences_to_second_order(routing: Routing) -> None:
    slots = sort_slots(routing)
    tokens = torch.randn(routing.num_tokens, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(slots.num_rows, 2, dtype=torch.float64, requires_grad=True)
    if routing.num_tokens and slots.num_rows:
        assert torch.autograd.gradcheck(lambda x: permute(x, slots), (tokens,))
        assert torch.autograd.gradcheck(lambda x: unpermute(x, slots), (rows,))
        assert torch.autograd.gradgradcheck(lambda x: permute(x, slots) ** 2, (tokens,))


def test_expanded_and_transposed_inputs_and_gradients_are_handled() -> None:
    routing = make_routing([[1, 0], [2, 1], [0, 2]], 3, 2)
    slots = sort_slots(routing)
    base = torch.randn(4, 3, dtype=torch.float64)
    for tokens in (base.T[:, :4], base[0, :1].expand(3, 4), torch.randn(3, 8).double()[:, ::2]):
        leaf = tokens.detach().requires_grad_()
        rows = permute(leaf, slots)
        assert rows.equal(tokens[slots.row_token])
        rows.sum().backward()  # an expanded gradient, stride 0
        assert leaf.grad is not None
        assert leaf.grad.equal(torch.full((3, 4), 2.0, dtype=torch.float64))


def test_low_precision_rows_are_added_up_in_fp32() -> None:
    routing = make_routing([[0, 1, 2]], 3, 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert unpermute(rows, sort_slots(routing)).item() == 258.0  # 256 + 1 is 256 in bfloat16
