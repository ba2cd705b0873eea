"""Wrong routers and capacity cuts are refuted by the claim that they break; a plain right one passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.core.config import RouterConfig
from isozyme.moe.testing import RouterPromises, Violation, check_capacity, check_router

Route = Callable[[Tensor], tuple[Tensor, Tensor]]


def right(config: RouterConfig) -> Route:
    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        wide = torch.where(wide.isfinite().all(-1, keepdim=True), wide, torch.nan)
        scores = wide.softmax(-1) if config.score == "softmax" else torch.sigmoid(wide)
        ids = torch.sort(scores.nan_to_num(), dim=-1, descending=True, stable=True).indices[:, : config.topk]
        weights = scores.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) if config.renormalize else weights

    return route


def changed(how: Callable[[RouterConfig, Route, Tensor], Any]) -> Callable[[RouterConfig], Any]:
    return lambda config: lambda logits: how(config, right(config), logits)


def torch_topk(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids = logits.float().nan_to_num().topk(config.topk).indices
    scores = logits.double().softmax(-1) if config.score == "softmax" else torch.sigmoid(logits.double())
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) if config.renormalize else weights


def in_the_dtype_of_the_logits(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids, weights = route(logits)
    return ids, weights.to(logits.dtype)


def softmax_over_the_batch(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids, weights = route(logits)
    return ids, weights * logits.softmax(0).gather(-1, ids)


def worst_first(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids, weights = route(logits)
    return ids.flip(-1), weights.flip(-1)


def never_renormalised(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids, weights = route(logits)
    return (ids, weights * 0.5) if config.renormalize else (ids, weights)


def without_gradient(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids, weights = route(logits)
    return ids, weights.detach()


def one_expert_twice(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids, weights = route(logits)
    return ids[:, :1].expand_as(ids), weights


def hides_nan(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    return route(logits.nan_to_num(posinf=0.0, neginf=0.0))


def nan_reaches_all(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    ids, weights = route(logits)
    return ids, weights + 0 * logits.sum()


def centred_in_place(config: RouterConfig, route: Route, logits: Tensor) -> Any:
    with torch.no_grad():
        logits.sub_(1.0)
    return route(logits)


FAULTS = {
    torch_topk: "the_best_experts_are_chosen",
    worst_first: "the_best_experts_are_chosen",
    in_the_dtype_of_the_logits: "weights_equal_the_definition",
    never_renormalised: "weights_equal_the_definition",
    softmax_over_the_batch: "weights_equal_the_definition",
    without_gradient: "logit_gradients_equal_the_definition",
    one_expert_twice: "ids_are_legal",
    hides_nan: "bad_logits_stay_visible_and_alone",
    nan_reaches_all: "bad_logits_stay_visible_and_alone",
    centred_in_place: "inputs_are_not_mutated",
}


def test_a_right_router_passes() -> None:
    assert check_router(right, examples=60).worlds == 60


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_by_the_claim_that_it_breaks_and_replays(fault: Any) -> None:
    with pytest.raises(Violation) as caught:
        check_router(changed(fault), seconds=0.5)
    assert caught.value.invariant == FAULTS[fault]
    with pytest.raises(Violation, match=FAULTS[fault]):
        check_router(changed(fault), replay=caught.value.replay)


def test_a_router_that_looks_at_other_tokens_is_found_by_routing_them_alone() -> None:
    with pytest.raises(Violation, match="tokens_are_routed_alone"):
        check_router(changed(softmax_over_the_batch), only=["tokens_are_routed_alone"], seconds=0.5)


def test_ties_may_go_anywhere_where_nothing_is_promised() -> None:
    promises = RouterPromises(
        ties_to_the_lower_id=False, bad_logits=False, renormalize=(False,), dtypes=("float32",)
    )
    check_router(changed(torch_topk), promises=promises, examples=60, seconds=4.0)


def test_the_drawing_shows_logits_and_choices() -> None:
    line = "experts=2 topk=1 score=softmax renormalize=1 groups=1.1 dtype=float64 logits=0,4"
    with pytest.raises(Violation) as caught:
        check_router(
            changed(lambda config, route, logits: (1 - route(logits)[0], route(logits)[1])), replay=line
        )
    assert "token 0: logits [0.0, 1.0] → [1]   <-- went to [0]" in str(caught.value)


# --- Capacity


def by_loop(ids: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
    kept = torch.zeros_like(ids, dtype=torch.bool)
    for expert in range(num_experts):
        places = (ids == expert).nonzero().tolist()
        places.sort(key=lambda place: -float(weights[place[0], place[1]]))
        for token, choice in places[:capacity]:
            kept[token, choice] = True
    return kept


def one_too_many(ids: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
    return by_loop(ids, weights, num_experts, capacity + 1)


def zero_means_default(ids: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
    return by_loop(ids, weights, num_experts, capacity or len(ids))


def first_come(ids: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
    return by_loop(ids, torch.ones_like(weights), num_experts, capacity)


def topk_over_tokens(ids: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
    masked = torch.where(ids[:, 0] == 0, weights[:, 0], 0.0)
    masked.topk(capacity)
    return by_loop(ids, weights, num_experts, capacity)


def test_a_right_cut_passes() -> None:
    assert check_capacity(by_loop, policy="probability", examples=60).worlds == 60
    assert check_capacity(first_come, policy="position", examples=60).worlds == 60


@pytest.mark.parametrize(
    ("cut", "claim"),
    [
        (one_too_many, "capacity_is_exact"),
        (zero_means_default, "capacity_is_exact"),
        (first_come, "the_right_slots_are_kept"),
        (topk_over_tokens, "the_program_runs_to_its_end"),
    ],
)
def test_a_wrong_cut_is_found_and_replays(cut: Any, claim: str) -> None:
    with pytest.raises(Violation, match=claim) as caught:
        check_capacity(cut, policy="probability", seconds=0.5)
    with pytest.raises(Violation, match=claim):
        check_capacity(cut, policy="probability", replay=caught.value.replay)
