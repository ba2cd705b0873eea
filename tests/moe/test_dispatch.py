"""Each dispatcher on chosen cases: order of rows, extremes, traces, waits and refusals."""

from __future__ import annotations

import pytest
import torch

from isozyme.core.errors import CommunicationError, ConfigError, UsageError
from isozyme.core.topology import Layout, Topology
from isozyme.moe.dispatch import choose_dispatcher
from isozyme.moe.dispatch_allgather import AllGatherDispatcher
from isozyme.moe.dispatch_alltoall import AllToAllDispatcher
from isozyme.moe.dispatch_local import LocalDispatcher
from isozyme.moe.dispatch_padded import PaddedAllToAllDispatcher
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.types import Dispatcher, Routing
from isozyme.parallel.process_groups import ProcessGroups, SingleWorld
from isozyme.parallel.simulated import SimulatedWorld, simulate
from tests.moe.dispatch_case import Case, fullest, reference, run

SPREAD = ("alltoall", "allgather", "padded")


def case(
    ids: list[list[tuple[int, ...]]],
    experts: int,
    layout: Layout,
    drop: set[tuple[int, int, int]] | None = None,
) -> Case:
    """A case from the experts of each rank's tokens, without the slots (rank, token, choice) of `drop`."""
    kept = tuple(
        tuple(tuple((r, t, k) not in (drop or ()) for k in range(len(row))) for t, row in enumerate(rows))
        for r, rows in enumerate(ids)
    )
    topk = next((len(row) for rows in ids for row in rows), 1)
    return Case(
        layout=layout, num_experts=experts, topk=topk, ids=tuple(tuple(rows) for rows in ids), kept=kept
    )


EP2, EP4 = Layout(ep=2), Layout(ep=4)
EXTREMES = {
    "skewed and ragged": case([[(0, 3), (2, 0), (0, 1)], [(0, 2)]], 4, EP2),
    "everything to one rank": case([[(0, 1)] * 3, [(1, 0)] * 2, [], [(0, 1)]], 8, EP4),
    "everything to one expert": case([[(7,)] * 2, [(7,)] * 3, [(7,)], []], 8, EP4),
    "ranks without tokens": case([[], [(1, 2)] * 2, [], []], 4, EP4),
    "no tokens at all": case([[], [], [], []], 4, EP4),
    "all slots dropped": case([[(0, 1)], [(3, 2)]], 4, EP2, {(r, 0, k) for r in (0, 1) for k in (0, 1)}),
    "some slots dropped": case([[(3, 0), (1, 0)], [(0, 3), (2, 3)]], 4, EP2, {(0, 0, 0), (1, 0, 1)}),
    "every expert chosen": case([[(2, 0, 3, 1)] * 2, [(1, 3, 0, 2)]], 4, EP2),
    "half the experts empty": case([[(0, 2), (2, 0)], [(2, 0)] * 3], 4, EP2),
    "expert data parallel": case([[(0, 3)] * 2, [(1, 2)], [(3, 1)] * 3, []], 4, Layout(ep=2, dp=4)),
    "expert tensor parallel": case([[(0, 3)] * 2, [(1, 2)], [(3, 1)] * 3, []], 4, Layout(ep=2, etp=2)),
    "expert tensor parallel alone": case([[(0, 3)] * 2, []], 4, Layout(etp=2)),
    "expert ranks far apart": case(
        [[(0, 3)] * 2, [(1, 2)], [(3, 1)] * 3, []], 4, Layout(ep=2, etp=2, order="cp-ep-tp-dp-pp")
    ),
}


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("of", EXTREMES.values(), ids=EXTREMES.keys())
def test_values_and_every_gradient_equal_the_dense_loop(of: Case, name: str) -> None:
    run(of, name).assert_close(reference(of))


@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("of", EXTREMES.values(), ids=EXTREMES.keys())
def test_every_rank_makes_the_same_calls_whatever_its_counts(of: Case, name: str) -> None:
    trace = run(of, name).trace
    assert trace is not None
    assert trace.difference() is None
    assert len(trace[0]) > 0


@pytest.mark.parametrize("name", ["local", *SPREAD])
def test_one_rank_is_an_ordinary_group(name: str) -> None:
    of = case([[(0, 3), (2, 0), (0, 1)]], 4, Layout(), {(0, 1, 0)})
    run(of, name).assert_close(reference(of))


@pytest.mark.parametrize("name", ["alltoall", "allgather"])
def test_rows_arrive_by_expert_then_rank_then_token(name: str) -> None:
    of = EXTREMES["skewed and ragged"]
    first, second = run(of, name).dispatched
    assert first.counts_on_host() == (4, 1)
    codes = [
        torch.cat([of.tokens(0)[t][None] if r == 0 else of.tokens(1)[t][None]])
        for r, t in [(0, 0), (0, 1), (0, 2), (1, 0), (0, 2)]
    ]
    assert first.rows.equal(torch.cat(codes))
    probs = [
        of.routing(r).topk_probs[t, k] for r, t, k in [(0, 0, 0), (0, 1, 1), (0, 2, 0), (1, 0, 0), (0, 2, 1)]
    ]
    assert first.probs.equal(torch.stack(probs))
    assert second.counts_on_host() == (2, 1)
    assert second.rows.equal(torch.stack([of.tokens(0)[1], of.tokens(1)[0], of.tokens(0)[0]]))
    for dispatched in (first, second):
        assert dispatched.tokens_per_expert.tolist() == list(dispatched.counts_on_host())
        assert dispatched.num_rows == len(dispatched.rows) == len(dispatched.probs)


def test_padded_buffers_have_exactly_the_capacity_and_filler_is_zero() -> None:
    of = EXTREMES["some slots dropped"]
    capacity = fullest(of) + 1
    for dispatched in run(of, "padded").dispatched:
        assert dispatched.counts_on_host() == (2 * capacity, 2 * capacity)
        filler = dispatched.probs == 0
        assert (dispatched.rows[filler] == 0).all()
    kept = sum(int(of.routing(r).kept.sum()) for r in range(2))
    assert sum(int((d.probs != 0).sum()) for d in run(of, "padded").dispatched) == kept


def test_padded_exchanges_have_the_same_sizes_whatever_the_routing() -> None:
    one, other = (case([[ids] * 2, [ids] * 2], 4, EP2) for ids in ((0, 1), (3, 2)))
    shapes = [[r.shape for r in run(of, "padded").trace[0]] for of in (one, other)]  # type: ignore[index]
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 6  # rows, weights and results, forward and backward: no counts


def test_a_capacity_that_the_routing_exceeds_is_refused() -> None:
    placement = ExpertPlacement.of(ProcessGroups(Topology(Layout()), SingleWorld()), 4)
    of = case([[(1,), (1,), (2,)]], 4, Layout())
    with pytest.raises(UsageError, match="capacity=1; the fullest has 2"):
        PaddedAllToAllDispatcher(placement, 1).dispatch(of.tokens(0), of.routing(0))


def test_ranks_whose_buffers_differ_in_size_are_found() -> None:
    of = EXTREMES["skewed and ragged"]

    def uneven(_: str, placement: ExpertPlacement, __: Case) -> PaddedAllToAllDispatcher:
        return PaddedAllToAllDispatcher(placement, 4 + placement.communicator.rank)

    with pytest.raises(CommunicationError, match="all_to_all"):
        run(of, "", uneven)


def test_all_to_all_sends_only_the_rows_that_others_need() -> None:
    of = EXTREMES["skewed and ragged"]
    trace = run(of, "alltoall").trace
    assert trace is not None
    rows = [r for r in trace[0] if r.kind == "all_to_all" and r.shape is not None and len(r.shape) == 2]
    forward = [r.input_sizes for r in rows][1]  # the first exchanges the counts
    assert forward == (4, 2)
    assert run(of, "alltoall").trace is not None


def equal_allgather(_: str, placement: ExpertPlacement, __: Case) -> AllGatherDispatcher:
    return AllGatherDispatcher(placement, equal_tokens=True)


def test_ranks_with_equally_many_tokens_need_not_ask_and_unequal_ones_are_found() -> None:
    equal = case([[(0, 3), (2, 0)], [(1, 2), (3, 1)]], 4, EP2)
    asked, told = run(equal, "allgather"), run(equal, "", equal_allgather)
    told.assert_close(asked, 0.0)
    assert len(told.trace[0]) == len(asked.trace[0]) - 1  # type: ignore[index]
    with pytest.raises(CommunicationError, match="all_gather"):
        run(EXTREMES["skewed and ragged"], "", equal_allgather)


def test_two_ranks_add_results_in_their_own_type_and_more_in_a_wide_one() -> None:
    def program(world: SimulatedWorld) -> torch.dtype | None:
        placement = ExpertPlacement.of(ProcessGroups(Topology(Layout(ep=world.size)), world), 4)
        dispatcher = AllGatherDispatcher(placement)
        routing = EXTREMES["every expert chosen"].routing(0)
        arrival = dispatcher.send(torch.ones(2, 3).bfloat16(), routing)
        dispatcher.bring_back(arrival.rows, arrival)
        return None

    for size, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        _, trace = simulate(size, program, trace=True)
        assert trace[0][-1].kind == "reduce_scatter"
        assert trace[0][-1].dtype == dtype


def test_work_between_start_and_finish_changes_nothing() -> None:
    of = EXTREMES["expert data parallel"]

    class Overlapped(AllToAllDispatcher):
        def send(self, tokens, routing):  # type: ignore[no-untyped-def]
            started = self.send_start(tokens, routing)
            _ = tokens @ tokens.T
            return self.send_finish(started)

    run(of, "", lambda _, placement, __: Overlapped(placement)).assert_close(reference(of))


def test_rows_keep_their_dtype_and_weights_theirs() -> None:
    of = EXTREMES["skewed and ragged"]

    def program(world: SimulatedWorld) -> list[torch.dtype]:
        placement = ExpertPlacement.of(ProcessGroups(Topology(of.layout), world), 4)
        found = []
        for dispatcher in (
            AllToAllDispatcher(placement),
            AllGatherDispatcher(placement),
            PaddedAllToAllDispatcher(placement, 4),
        ):
            dispatched = dispatcher.dispatch(of.tokens(world.rank).bfloat16(), of.routing(world.rank))
            back = dispatcher.combine(dispatched.rows, dispatched)
            found += [dispatched.rows.dtype, dispatched.probs.dtype, back.dtype]
        return found

    for found in simulate(2, program):
        assert found == [torch.bfloat16, torch.float64, torch.bfloat16] * 3


def test_auto_takes_local_on_one_rank_and_all_to_all_else() -> None:
    one = ExpertPlacement.of(ProcessGroups(Topology(Layout()), SingleWorld()), 4)
    dispatcher, why = choose_dispatcher("auto", one)
    assert isinstance(dispatcher, LocalDispatcher)
    assert "auto chose local" in why

    def program(world: SimulatedWorld) -> str:
        placement = ExpertPlacement.of(ProcessGroups(Topology(EP2), world), 4)
        with pytest.raises(ConfigError, match="dispatcher=local, ep=2"):
            choose_dispatcher("local", placement)
        chosen, reason = choose_dispatcher("auto", placement)
        assert isinstance(chosen, Dispatcher)
        return f"{type(chosen).__name__}: {reason}"

    assert simulate(2, program) == ["AllToAllDispatcher: auto chose alltoall (experts on 2 ranks)"] * 2


def test_experts_that_ep_does_not_divide_are_refused() -> None:
    def program(world: SimulatedWorld) -> None:
        with pytest.raises(ConfigError, match="5 % 2 = 1"):
            ExpertPlacement.of(ProcessGroups(Topology(EP2), world), 5)

    simulate(2, program)


def test_buffers_of_no_rows_at_all_are_exchanged_too() -> None:
    """Nobody keeps a slot, and the capacity is zero: zeros come back, and gradients are zero."""

    def program(world: SimulatedWorld) -> tuple[float, float]:
        placement = ExpertPlacement.of(ProcessGroups(Topology(Layout(dp=2, ep=2)), world), 4)
        dispatcher = PaddedAllToAllDispatcher(placement, 0)
        tokens = torch.randn(3, 2, requires_grad=True)
        routing = Routing(
            topk_ids=torch.zeros(3, 1, dtype=torch.int64),
            topk_probs=torch.ones(3, 1),
            kept=torch.zeros(3, 1, dtype=torch.bool),
            num_experts=4,
        )
        dispatched = dispatcher.dispatch(tokens, routing)
        out = dispatcher.combine(dispatched.rows, dispatched)
        (grad,) = torch.autograd.grad(out.sum(), tokens)
        return out.abs().sum().item(), grad.abs().sum().item()

    assert simulate(2, program) == [(0.0, 0.0)] * 2
