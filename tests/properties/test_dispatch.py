"""Dispatch as a property: any layout, routing and schedule of the ranks. All is drawn before they start."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from isozyme.core.topology import Layout, Topology
from tests.moe.dispatch_case import Case, Outcome, reference, run

SIZES = [(2, 1, 1), (4, 1, 1), (2, 1, 2), (3, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 2), (3, 2, 1), (2, 1, 3)]
"""EP, ETP, EDP."""
NAMES = st.sampled_from(["alltoall", "allgather", "padded"])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to six ranks; ragged tokens with empty ranks; skewed experts; drops; K up to E."""
    ep, etp, edp = draw(st.sampled_from(SIZES))
    layout = Layout(ep=ep, etp=etp, dp=ep * etp * edp)
    ranks, experts = ep * etp * edp, ep * draw(st.integers(1, 3))
    topk = draw(st.integers(1, min(experts, 4)))
    favourites = draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=experts, unique=True))
    popular = [*favourites, *(e for e in range(experts) if e not in favourites)]
    choice = st.one_of(
        st.just(tuple(popular[:topk])),
        st.permutations(range(experts)).map(lambda order: tuple(order[:topk])),
    )
    flags = st.one_of(st.just((True,) * topk), st.tuples(*[st.booleans()] * topk), st.just((False,) * topk))
    tokens = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    return Case(
        layout=layout,
        num_experts=experts,
        topk=topk,
        ids=tuple(tuple(draw(choice) for _ in range(n)) for n in tokens),
        kept=tuple(tuple(draw(flags) for _ in range(n)) for n in tokens),
        schedule_seed=draw(st.integers(0, 2**16)),
    )


def row_codes(outcome: Outcome) -> list[tuple[float, ...]]:
    """Every real row that arrived anywhere, with its weight."""
    return sorted(
        (*row.tolist(), float(prob))
        for dispatched in outcome.dispatched
        for row, prob in zip(dispatched.rows.detach(), dispatched.probs.detach(), strict=True)
        if prob != 0
    )


@given(cases(), NAMES)
def test_every_dispatcher_equals_the_dense_loop_and_ranks_never_disagree_about_a_call(
    case: Case, name: str
) -> None:
    outcome = run(case, name)
    outcome.assert_close(reference(case))
    assert outcome.trace is not None
    assert outcome.trace.difference() is None


@given(cases())
def test_all_gather_and_all_to_all_deliver_the_same_rows_in_the_same_order(case: Case) -> None:
    gathered, exchanged = run(case, "allgather"), run(case, "alltoall")
    for one, other in zip(gathered.dispatched, exchanged.dispatched, strict=True):
        assert one.rows.equal(other.rows)
        assert one.probs.equal(other.probs)
        assert one.counts_on_host() == other.counts_on_host()
    gathered.assert_close(exchanged)


@given(cases(), NAMES)
def test_every_kept_slot_arrives_once_on_each_rank_of_its_expert_and_no_other_does(
    case: Case, name: str
) -> None:
    etp = Topology(case.layout).size("etp")
    want = []
    for rank in range(case.ranks):
        routing, tokens = case.routing(rank), case.tokens(rank)
        for token, choice in routing.kept.nonzero().tolist():
            row = (*tokens[token].tolist(), float(routing.topk_probs[token, choice]))
            want += [row] * etp
    assert row_codes(run(case, name)) == sorted(want)


@given(cases(), NAMES, st.integers(0, 2**16))
def test_the_schedule_of_the_ranks_does_not_matter(case: Case, name: str, seed: int) -> None:
    other = Case(**{**vars(case), "schedule_seed": seed})
    for _, mine, theirs in run(case, name).pairs(run(other, name)):
        assert torch.equal(mine, theirs)
