"""Routings have the distributions that their names promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from isozyme.core.errors import ConfigError
from isozyme.launch.bench_routing import choose_ids, choose_probs

TOKENS, EXPERTS, TOPK = 4096, 16, 4
FORMS = ("balanced", "random", "zipf:1.2", "zipf:0.6", "hot:0.5", "half-empty")


def ids_of(
    text: str, tokens: int = TOKENS, experts: int = EXPERTS, topk: int = TOPK, seed: int = 3
) -> Tensor:
    return choose_ids(text, tokens=tokens, num_experts=experts, topk=topk, seed=seed)


def counts_of(text: str) -> Tensor:
    return torch.bincount(ids_of(text).flatten(), minlength=EXPERTS)


@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize(("experts", "topk"), [(16, 4), (5, 1), (4, 3), (2, 2)])
def test_the_experts_of_a_token_are_distinct_and_exist(text: str, experts: int, topk: int) -> None:
    ids = ids_of(text, tokens=257, experts=experts, topk=topk)
    assert ids.shape == (257, topk)
    assert ids.dtype == torch.int64
    assert int(ids.min()) >= 0
    assert int(ids.max()) < experts
    assert all(len(set(row)) == topk for row in ids.tolist())


@pytest.mark.parametrize("text", FORMS)
def test_a_seed_gives_the_same_routing_and_another_seed_another(text: str) -> None:
    assert torch.equal(ids_of(text), ids_of(text))
    assert not torch.equal(ids_of(text), ids_of(text, seed=4))


def test_balanced_gives_every_expert_the_same_number_of_slots() -> None:
    assert counts_of("balanced").tolist() == [TOKENS * TOPK // EXPERTS] * EXPERTS


def test_balanced_differs_by_one_slot_at_most_where_slots_do_not_divide() -> None:
    counts = torch.bincount(ids_of("balanced", tokens=11, experts=7, topk=3).flatten(), minlength=7)
    assert int(counts.max() - counts.min()) == 1


def test_the_rows_of_an_expert_are_scattered_over_the_tokens() -> None:
    owner = ids_of("balanced")[:, 0]
    assert len(set(torch.where(owner == owner[0])[0].diff().tolist())) > 3


def test_half_of_the_experts_are_empty_and_the_others_balanced() -> None:
    counts = sorted(counts_of("half-empty").tolist())
    assert counts == [0] * (EXPERTS // 2) + [2 * TOKENS * TOPK // EXPERTS] * (EXPERTS // 2)


def test_a_share_of_the_tokens_has_the_hot_expert_and_no_other_has() -> None:
    ids = ids_of("hot:0.5")
    assert int((ids == 0).any(dim=1).sum()) == TOKENS // 2
    rest = torch.bincount(ids.flatten(), minlength=EXPERTS)[1:].double()
    assert float(rest.max() / rest.min()) < 1.2


def test_zipf_orders_experts_by_a_power_of_their_rank() -> None:
    ids = ids_of("zipf:1.2", topk=1, tokens=200_000)
    shares = torch.bincount(ids.flatten(), minlength=EXPERTS).double().sort(descending=True).values
    expected = torch.arange(1, EXPERTS + 1, dtype=torch.float64) ** -1.2
    torch.testing.assert_close(shares / shares.sum(), expected / expected.sum(), rtol=0.05, atol=0)


def test_a_steeper_zipf_is_more_skewed_and_random_is_even() -> None:
    top = {text: int(counts_of(text).max()) for text in ("random", "zipf:0.6", "zipf:1.2")}
    assert top["random"] < 1.15 * TOKENS * TOPK / EXPERTS
    assert top["random"] < top["zipf:0.6"] < top["zipf:1.2"]


def test_weights_of_a_token_sum_to_one_and_the_first_is_largest() -> None:
    probs = choose_probs(50, 3, seed=1)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(50))
    assert bool((probs.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("text", ["even", "zipf", "zipf:x", "hot:2", "balanced:3"])
def test_a_routing_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--routing"):
        ids_of(text)
