"""The router module: against the naive routing, on padding, replay, recomputation, and over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from isozyme.core.config import RouterConfig
from isozyme.core.errors import ConfigError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.capacity import apply_capacity
from isozyme.moe.reference import reference_routing
from isozyme.moe.router import Router
from isozyme.moe.types import RouterStats, Routing
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld, World
from isozyme.parallel.shard_spec import named_shards, spec_of
from isozyme.parallel.simulated import simulate

HIDDEN = 6


def make_router(
    groups: ProcessGroups | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    std: float = 1.0,
    **settings: Any,
) -> Router:
    config = RouterConfig(**{"num_experts": 5, "topk": 2, **settings})
    if groups is None:
        groups = ProcessGroups(Topology(Layout()), SingleWorld())
    return Router(
        config, name="layers.3.moe.router", hidden=HIDDEN, groups=groups, seed=1, init_std=std, dtype=dtype
    )


def some_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def all_real(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def weight_gradient(router: Router, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, router.weight, retain_graph=True)
    return gradient


def total_loss(routing: Routing, stats: RouterStats) -> Tensor:
    """A task loss that uses every weight differently, and the auxiliary losses."""
    ramp = torch.arange(routing.topk_probs.numel(), dtype=torch.float64).view_as(routing.topk_probs)
    return (routing.topk_probs * ramp.cos()).sum() + stats.aux_loss + stats.z_loss


@given(
    st.integers(0, 9),
    st.sampled_from(["softmax", "sigmoid"]),
    st.booleans(),
    st.sampled_from([(1, 1), (3, 2), (6, 3)]),
    st.sampled_from([0.0, 0.1]),
)
def test_routing_equals_the_naive_one(
    count: int, score: str, renormalize: bool, groups: tuple[int, int], rate: float
) -> None:
    router = make_router(
        num_experts=6,
        score=score,
        renormalize=renormalize,
        num_groups=groups[0],
        topk_groups=groups[1],
        expert_bias_rate=rate,
        scaling_factor=1.5,
    )
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1, 0.0, -0.4]))
    tokens = some_tokens(count, seed=count)
    valid = torch.arange(count) % 3 != 1
    routing, stats = router(tokens, valid, 1)
    expected = reference_routing(
        tokens @ router.weight.T, router.config, token_valid=valid, expert_bias=router.expert_bias
    )
    real = valid.nonzero().flatten()
    assert torch.equal(routing.topk_ids[real], expected.topk_ids[real])
    assert torch.equal(routing.kept, expected.kept)
    torch.testing.assert_close(routing.topk_probs, expected.topk_probs, rtol=1e-12, atol=1e-14)
    assert torch.equal(stats.routed, expected.local_tokens_per_expert())
    assert not stats.dropped.any()


def test_padding_may_hold_anything_and_changes_nothing() -> None:
    router = make_router(aux_loss=0.3, z_loss=0.1)
    tokens = some_tokens(8)
    routing, stats = router(tokens, all_real(8), 2)
    expected = weight_gradient(router, total_loss(routing, stats))
    padded = torch.full((2, 7, HIDDEN), torch.nan, dtype=torch.float64)
    padded[:, :4] = tokens.view(2, 4, HIDDEN)
    valid = (torch.arange(7) < 4).repeat(2)
    more, more_stats = router(padded.flatten(0, 1).requires_grad_(), valid, 2)
    assert not more.kept[~valid].any()
    assert not more.topk_probs[~valid].any()
    assert bool(((more.topk_ids >= 0) & (more.topk_ids < 5)).all())
    assert torch.equal(more_stats.routed, stats.routed)
    real = Routing(
        topk_ids=more.topk_ids[valid], topk_probs=more.topk_probs[valid], kept=more.kept[valid], num_experts=5
    )
    assert torch.equal(real.topk_ids, routing.topk_ids)
    torch.testing.assert_close(
        weight_gradient(router, total_loss(real, more_stats)), expected, rtol=1e-12, atol=1e-14
    )


def test_only_padding_gives_finite_zero_losses_and_gradients() -> None:
    router = make_router(aux_loss=0.3, z_loss=0.1)
    routing, stats = router(some_tokens(6), torch.zeros(6, dtype=torch.bool), 2)
    assert (stats.aux_loss.item(), stats.z_loss.item()) == (0.0, 0.0)
    assert not stats.routed.any()
    assert not weight_gradient(router, total_loss(routing, stats)).any()


def test_no_tokens_at_all_still_give_a_zero_gradient() -> None:
    router = make_router(aux_loss=0.3, z_loss=0.1)
    for windows in (0, 2):
        routing, stats = router(some_tokens(0), all_real(0), windows)
        assert routing.topk_ids.shape == (0, 2)
        assert torch.equal(
            weight_gradient(router, total_loss(routing, stats)), torch.zeros(5, HIDDEN, dtype=torch.float64)
        )


def test_auxiliary_losses_enter_the_gradient_exactly_once() -> None:
    plain, both = make_router(aux_loss=0.0), make_router(aux_loss=0.3, z_loss=0.2)
    unit = make_router(aux_loss=1.0, z_loss=1.0)
    tokens = some_tokens(12)
    task = weight_gradient(plain, total_loss(*plain(tokens, all_real(12), 3)))
    total = weight_gradient(both, total_loss(*both(tokens, all_real(12), 3)))
    _, stats = unit(tokens, all_real(12), 3)
    extra = 0.3 * weight_gradient(unit, stats.aux_loss) + 0.2 * weight_gradient(unit, stats.z_loss)
    assert float(extra.norm()) > 1e-3
    torch.testing.assert_close(total - task, extra, rtol=1e-11, atol=1e-13)


def test_non_finite_tokens_are_visible_and_leave_the_others_alone() -> None:
    router = make_router()
    tokens = some_tokens(5)
    expected, _ = router(tokens, all_real(5), 1)
    broken = tokens.clone()
    broken[2, 1] = torch.inf
    broken[3] = torch.nan
    routing, stats = router(broken, all_real(5), 1)
    assert bool(routing.topk_probs[2:4].isnan().all())
    assert bool(((routing.topk_ids >= 0) & (routing.topk_ids < 5)).all())
    assert int(stats.routed.sum()) == 10
    for row in (0, 1, 4):
        assert torch.equal(routing.topk_ids[row], expected.topk_ids[row])
        torch.testing.assert_close(routing.topk_probs[row], expected.topk_probs[row], rtol=1e-14, atol=0)


def test_replay_uses_the_given_ids_and_drops_with_the_present_scores() -> None:
    router = make_router(aux_loss=0.0)
    tokens = some_tokens(6)
    ids = torch.tensor([[4, 0], [0, 4], [1, 2], [3, 1], [2, 3], [0, 1]])
    kept = torch.tensor(
        [[True, False], [True, True], [False, False], [True, True], [True, True], [True, True]]
    )
    override = Routing(topk_ids=ids, topk_probs=torch.zeros(6, 2), kept=kept, num_experts=5)
    valid = torch.tensor([True, True, True, True, True, False])
    routing, stats = router(tokens, valid, 1, override)
    weights = (tokens @ router.weight.T).gather(1, ids).softmax(-1)
    expected = torch.where(kept & valid[:, None], weights, torch.zeros_like(weights))
    torch.testing.assert_close(routing.topk_probs, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        weight_gradient(router, total_loss(routing, stats)),
        weight_gradient(
            router, total_loss(Routing(topk_ids=ids, topk_probs=expected, kept=kept, num_experts=5), stats)
        ),
        rtol=1e-11,
        atol=1e-13,
    )
    assert stats.routed.tolist() == [2, 2, 2, 2, 2]
    assert stats.dropped.tolist() == [1, 1, 1, 0, 0]


def test_replaying_ones_own_routing_changes_no_bit_after_capacity_either() -> None:
    router = make_router(aux_loss=0.3)
    tokens = some_tokens(12)
    routing, stats = router(tokens, all_real(12), 2)
    limited = apply_capacity(routing, 2, 2, "probability")
    again, again_stats = router(tokens, all_real(12), 2, limited.routing)
    assert torch.equal(again.topk_probs, limited.routing.topk_probs)
    assert torch.equal(again.kept, limited.routing.kept)
    assert torch.equal(again_stats.dropped, limited.dropped)
    assert torch.equal(again_stats.routed, stats.routed)
    assert torch.equal(again_stats.aux_loss, stats.aux_loss)
    assert int(limited.dropped.sum()) > 0


def test_flips_of_a_foreign_routing_are_found() -> None:
    router = make_router(score="sigmoid", expert_bias_rate=0.1)
    tokens = some_tokens(6)
    routing, _ = router(tokens, all_real(6), 1)
    assert router.routing_flips(tokens, all_real(6), routing).tokens.numel() == 0
    ids = routing.topk_ids.clone()
    ids[3, 1] = next(e for e in range(5) if e not in ids[3].tolist())
    foreign = Routing(topk_ids=ids, topk_probs=routing.topk_probs, kept=routing.kept, num_experts=5)
    flips = router.routing_flips(tokens, all_real(6), foreign)
    scores = (tokens[3] @ router.weight.T).sigmoid().detach()
    assert flips.tokens.tolist() == [3]
    assert flips.gaps.item() == pytest.approx(float(scores[routing.topk_ids[3, 1]] - scores[ids[3, 1]]))


def test_an_override_of_other_tokens_is_refused() -> None:
    router = make_router()
    routing, _ = router(some_tokens(4), all_real(4), 1)
    with pytest.raises(ConfigError, match=r"=\(4, 2, 5\); here they are \(6, 2, 5\)"):
        router(some_tokens(6), all_real(6), 1, routing)


def test_a_broken_configuration_is_refused_with_its_arithmetic() -> None:
    with pytest.raises(ConfigError, match="topk must be between 1 and num_experts"):
        make_router(topk=6)


def test_recomputation_and_evaluation_count_nothing_twice() -> None:
    router = make_router(aux_loss=0.3)
    tokens = some_tokens(6).requires_grad_()
    state = {name: value.clone() for name, value in router.state_dict().items()}
    _, plain = router(tokens, all_real(6), 1)
    _, again = checkpoint(router, tokens, all_real(6), 1, use_reentrant=False)
    again.aux_loss.backward()
    router.eval()(tokens, all_real(6), 1)
    assert torch.equal(plain.routed, again.routed)
    assert torch.equal(plain.aux_loss, again.aux_loss)
    assert list(router.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in router.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_are_at_least_fp32_under_autocast_too(dtype: torch.dtype) -> None:
    router = make_router(dtype=dtype, z_loss=0.1)
    tokens = some_tokens(6).to(dtype)
    expected, _ = router(tokens, all_real(6), 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing, stats = router(tokens, all_real(6), 1)
    wide = torch.promote_types(dtype, torch.float32)
    assert {routing.topk_probs.dtype, stats.aux_loss.dtype, stats.z_loss.dtype} == {wide}
    assert torch.equal(routing.topk_probs, expected.topk_probs)
    total_loss(routing, stats).backward()
    assert router.weight.grad is not None
    assert router.weight.grad.dtype == dtype


def test_the_weight_and_bias_are_owned_by_their_global_names() -> None:
    router = make_router(expert_bias_rate=0.1)
    assert [name for name, _, _ in named_shards(router)] == [
        "layers.3.moe.router.weight",
        "layers.3.moe.router.expert_bias",
    ]
    assert spec_of(router.weight).reduce_axes == ("tp", "cp", "dp")


@pytest.mark.parametrize("scope", ["sequence", "global_lagged", "microbatch"])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2), Layout(tp=2, cp=2), Layout(tp=2, dp=2, ep=2)])
def test_router_gradients_summed_over_ranks_are_those_of_one_rank(scope: str, layout: Layout) -> None:
    topology = Topology(layout)
    windows, length, parts, replicas = 4, 8, layout.tp * layout.cp, topology.size("dp")
    tokens = some_tokens(windows * length).view(windows, length, HIDDEN)
    valid = torch.rand(windows, length, generator=torch.Generator().manual_seed(3)) < 0.7
    valid[1] = False
    ramp = torch.arange(windows * length * 2, dtype=torch.float64).cos().view(windows, length, 2)
    lagged = torch.tensor([3, 0, 9, 1, 2])

    def run(groups: ProcessGroups | None, rows: slice, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        router = make_router(groups, aux_scope=scope, aux_loss=0.5, z_loss=0.2)
        mine = tokens[rows][:, at]
        flat = mine.flatten(0, 1)
        routing, stats = router(flat, valid[rows][:, at].flatten(), mine.shape[0], lagged_counts=lagged)
        task = (routing.topk_probs * ramp[rows][:, at].flatten(0, 1)).sum()
        loss = task + stats.aux_loss + stats.z_loss
        return loss.detach(), weight_gradient(router, loss), stats.routed

    def rank(world: World) -> tuple[Tensor, Tensor, Tensor]:
        groups = ProcessGroups(topology, world)
        place = groups.coordinates
        count = windows // replicas
        rows = slice(place["dp"] * count, (place["dp"] + 1) * count)
        return run(groups, rows, torch.arange(length).view(parts, -1)[place["cp"] * layout.tp + place["tp"]])

    results = simulate(topology.world_size, rank)
    count = windows // replicas if scope == "microbatch" else windows
    alone = [
        run(None, slice(start, start + count), torch.arange(length)) for start in range(0, windows, count)
    ]
    for ours, theirs in zip(zip(*results, strict=True), zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(sum(ours), sum(theirs), rtol=1e-11, atol=1e-12)
