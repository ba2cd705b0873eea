"""Score functions, selection and weights against per-token Python, ties and non-finite rows included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isozyme.core.config import RouterConfig
from isozyme.moe.reference import reference_routing
from isozyme.moe.scores import (
    combine_weights,
    group_scores,
    log_scores,
    normalized_scores,
    routing_flips,
    select_experts,
    selection_scores,
    top_indices,
)

# Logits that are often tied; where they are not, their scores and sums of two scores are well apart.
GRID = [0.0, 0.37, 0.93, 1.71, 2.83]
BIASES = [0.0, 0.0, 0.013, -0.19]


@st.composite
def configs(draw: st.DrawFn) -> RouterConfig:
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(1, 4))
    topk_groups = draw(st.integers(1, groups))
    return RouterConfig(
        num_experts=groups * size,
        topk=draw(st.integers(1, topk_groups * size)),
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        topk_groups=topk_groups,
    )


@st.composite
def routers(draw: st.DrawFn) -> tuple[RouterConfig, Tensor, Tensor]:
    config = draw(configs())
    tokens = draw(st.integers(0, 6))
    row = st.lists(st.sampled_from(GRID), min_size=config.num_experts, max_size=config.num_experts)
    logits = draw(st.lists(row, min_size=tokens, max_size=tokens))
    bias = draw(st.lists(st.sampled_from(BIASES), min_size=config.num_experts, max_size=config.num_experts))
    return (
        config,
        torch.tensor(logits, dtype=torch.float64).view(tokens, config.num_experts),
        torch.tensor(bias, dtype=torch.float64),
    )


@given(routers())
def test_choice_and_weights_equal_the_naive_ones_with_ties_groups_and_bias(
    case: tuple[RouterConfig, Tensor, Tensor],
) -> None:
    config, logits, bias = case
    log_score = log_scores(logits, config.score)
    selection = selection_scores(log_score, bias)
    ids = select_experts(selection, config)
    expected = reference_routing(logits, config, expert_bias=bias)
    flips = routing_flips(selection, expected.topk_ids, torch.ones(len(logits), dtype=torch.bool), config)
    # Scores that are tied on paper and not in rounding may fall either way; all others must agree.
    same = torch.ones(len(logits), dtype=torch.bool)
    same[flips.tokens] = False
    assert bool((flips.gaps <= 1e-12).all())
    torch.testing.assert_close(
        ids[same].sort(dim=1).values, expected.topk_ids[same].sort(dim=1).values, rtol=0, atol=0
    )
    weights = combine_weights(log_score, expected.topk_ids, config)
    torch.testing.assert_close(weights, expected.topk_probs, rtol=1e-12, atol=1e-14)


@given(st.integers(1, 70), st.sampled_from(["softmax", "sigmoid"]), st.floats(-20, 20), st.booleans())
def test_equal_logits_get_equal_scores_so_that_ties_go_to_the_lower_id(
    experts: int, score: str, logit: float, wide: bool
) -> None:
    dtype = torch.float64 if wide else torch.float32
    log_score = log_scores(torch.full((3, experts), logit, dtype=dtype), score)  # type: ignore[arg-type]
    config = RouterConfig(num_experts=experts, topk=experts)
    ids = select_experts(selection_scores(log_score), config)
    assert ids.tolist() == [list(range(experts))] * 3


@given(
    st.lists(
        st.lists(
            st.sampled_from([-1.5, 0.0, 2.0, float("nan"), float("inf"), -float("inf")]),
            min_size=5,
            max_size=5,
        ),
        max_size=6,
    ),
    st.integers(1, 5),
)
def test_top_indices_are_a_stable_descending_order_with_nan_first(
    rows: list[list[float]], count: int
) -> None:
    scores = torch.tensor(rows, dtype=torch.float64).view(len(rows), 5)
    clean = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    expected = [sorted(range(5), key=lambda e: (-row[e], e))[:count] for row in clean.tolist()]
    assert top_indices(scores, count).tolist() == expected


def test_group_score_is_the_sum_of_the_two_best_or_the_only_one() -> None:
    selection = torch.tensor([[1.0, 5.0, 2.0, 9.0, -1.0, -3.0]])
    assert group_scores(selection, 2).tolist() == [[7.0, 8.0]]
    assert group_scores(selection, 6).tolist() == selection.tolist()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    "bad",
    [
        [float("nan")] * 6,
        [float("inf")] * 6,
        [-float("inf")] * 6,
        [0.0, 1.0, 2.0, 3.0, 4.0, float("nan")],
        [0.0, float("inf"), 1, 2, 3, 4],
    ],
)
def test_non_finite_rows_stay_in_range_show_up_in_the_weights_and_leave_other_rows_alone(
    score: str, groups: int, renormalize: bool, bad: list[float]
) -> None:
    config = RouterConfig(
        num_experts=6,
        topk=3,
        score=score,
        num_groups=groups,
        renormalize=renormalize,  # type: ignore[arg-type]
    )
    good = torch.randn(4, 6, dtype=torch.float64)
    logits = torch.cat([good[:2], torch.tensor([bad], dtype=torch.float64), good[2:]])
    log_score = log_scores(logits, config.score)
    ids = select_experts(selection_scores(log_score), config)
    weights = combine_weights(log_score, ids, config)
    assert sorted(set(ids[2].tolist())) == sorted(ids[2].tolist())
    assert bool(((ids >= 0) & (ids < 6)).all())
    assert bool(weights[2].isnan().all())
    others = torch.tensor([0, 1, 3, 4])
    alone = log_scores(good, config.score)
    assert torch.equal(ids[others], select_experts(selection_scores(alone), config))
    assert torch.equal(weights[others], combine_weights(alone, ids[others], config))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients_of_weights_and_shares_are_exact(score: str, renormalize: bool) -> None:
    config = RouterConfig(num_experts=5, topk=2, score=score, renormalize=renormalize, scaling_factor=1.7)  # type: ignore[arg-type]
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    ids = select_experts(selection_scores(log_scores(logits, config.score)), config)

    def outputs(x: Tensor) -> tuple[Tensor, Tensor]:
        log_score = log_scores(x, config.score)
        return combine_weights(log_score, ids, config), normalized_scores(log_score, config.score)

    assert torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize("level", [-300.0, 300.0])
def test_saturated_sigmoids_still_renormalise_to_one_with_finite_gradients(level: float) -> None:
    config = RouterConfig(num_experts=4, topk=2, score="sigmoid")
    logits = (level + torch.arange(4.0)).view(1, 4).requires_grad_()
    log_score = log_scores(logits, "sigmoid")
    weights = combine_weights(log_score, select_experts(selection_scores(log_score), config), config)
    (weights * torch.tensor([1.0, 3.0])).sum().backward()
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_normalised_scores_are_the_scores_over_their_sum(score: str) -> None:
    logits = torch.randn(7, 5, dtype=torch.float64)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    shares = normalized_scores(log_scores(logits, score), score)  # type: ignore[arg-type]
    torch.testing.assert_close(shares, scores / scores.sum(-1, keepdim=True), rtol=1e-13, atol=1e-15)


def test_softmax_weights_renormalised_are_a_softmax_over_the_chosen_logits() -> None:
    config = RouterConfig(num_experts=6, topk=3)
    logits = torch.randn(9, 6, dtype=torch.float64)
    log_score = log_scores(logits, "softmax")
    ids = select_experts(selection_scores(log_score), config)
    expected = logits.gather(1, ids).softmax(-1)
    torch.testing.assert_close(combine_weights(log_score, ids, config), expected, rtol=1e-13, atol=0)


def test_flips_report_the_gap_of_real_tokens_only() -> None:
    config = RouterConfig(num_experts=4, topk=2)
    selection = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]])
    given_ids = torch.tensor([[1, 0], [0, 3], [2, 3]])
    flips = routing_flips(selection, given_ids, torch.tensor([True, True, True]), config)
    assert flips.tokens.tolist() == [1, 2]
    torch.testing.assert_close(flips.gaps, torch.tensor([0.2, 0.3]))
    assert routing_flips(selection, given_ids, torch.tensor([True, True, False]), config).tokens.tolist() == [
        1
    ]


def test_a_flip_between_tied_groups_has_a_small_gap_however_far_apart_their_experts_are() -> None:
    config = RouterConfig(num_experts=4, topk=1, num_groups=2, topk_groups=1)
    selection = torch.tensor([[0.9, 0.1, 0.5 + 1e-9, 0.5]], dtype=torch.float64)
    valid = torch.tensor([True])
    assert select_experts(selection, config).tolist() == [[2]]
    near = routing_flips(selection, torch.tensor([[0]]), valid, config)
    assert near.gaps.item() == pytest.approx(1e-9, rel=1e-3)
    wrong = routing_flips(selection, torch.tensor([[1]]), valid, config)
    assert wrong.gaps.item() == pytest.approx(0.8)


def test_a_flip_that_no_tie_explains_has_an_infinite_gap() -> None:
    config = RouterConfig(num_experts=4, topk=2, num_groups=2, topk_groups=1)
    selection = torch.tensor([[0.4, 0.3, 0.2, 0.1], [torch.nan] * 4])
    crossed = torch.tensor([[0, 2], [2, 3]])
    flips = routing_flips(selection, crossed, torch.tensor([True, True]), config)
    assert flips.gaps.tolist() == [torch.inf, torch.inf]


@pytest.mark.gpu
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [8, 37, 128])
def test_ties_fall_alike_on_cuda_and_cpu(score: str, experts: int) -> None:
    logits = torch.randint(0, 3, (500, experts)).float()
    config = RouterConfig(num_experts=experts, topk=6, score=score)  # type: ignore[arg-type]
    expected = [sorted(range(experts), key=lambda e: (-row[e], e))[:6] for row in logits.tolist()]
    for device in ("cpu", "cuda"):
        log_score = log_scores(logits.to(device), config.score)
        assert select_experts(selection_scores(log_score), config).tolist() == expected
