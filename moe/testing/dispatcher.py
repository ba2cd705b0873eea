"""Checking a dispatcher or a permutation: the claims, asked of worlds drawn for the purpose."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from isozyme.core.errors import UsageError, did_you_mean
from isozyme.core.topology import Layout
from isozyme.moe.testing import arrivals, results
from isozyme.moe.testing.adapters import DispatcherFactory, Place, Style
from isozyme.moe.testing.drawing import picture
from isozyme.moe.testing.inputs import dealt, experts_of, inputs_of, reweighted
from isozyme.moe.testing.observe import Run, Step, Subject, observe
from isozyme.moe.testing.oracle import Expected, dense_loop
from isozyme.moe.testing.schedule import LAST_FIRST
from isozyme.moe.testing.search import Report, search
from isozyme.moe.testing.search import replay as replay_world
from isozyme.moe.testing.strategies import Promises, worlds
from isozyme.moe.testing.violation import CLAIMS, Violation
from isozyme.moe.testing.world import World, on_one_rank, parse

ISOZYME = Promises(drops=True, etp=True, ordered=True, wide_sums=True)
"""What the dispatchers of isozyme promise."""
TORCH = Promises()
"""What is asked of a dispatcher of plain tensors unless it says otherwise."""
OF_SEVERAL_RUNS = frozenset(
    {
        "identity_experts_return_the_tokens",
        "outputs_are_linear_in_the_weights",
        "sums_are_rounded_once",
        "a_second_step_repeats_the_first",
        "the_schedule_does_not_matter",
        "the_layout_does_not_matter",
    }
)
"""Claims that need more than one run of a world."""


def check_dispatcher(
    factory: DispatcherFactory,
    *,
    style: Style = "isozyme",
    promises: Promises | None = None,
    examples: int = 60,
    seconds: float = 20.0,
    seed: int = 0,
    replay: str | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Look for a world in which a dispatcher loses, misplaces, misweighs or miscounts something.

    Args:
        factory: builds the dispatcher of one rank from a `Place`; called on every rank for every run.
        style: `isozyme` for the protocol `isozyme.moe.types.Dispatcher`; `torch` for a `TensorDispatcher`
            that communicates by torch.distributed (which is initialised in every simulated rank).
        promises: which worlds it may be shown; by default all that its style allows.
        examples: the most worlds to try; half as many more for the claims that compare several runs.
        seconds: the time for all of it; with a failure, the smallest world found until then is reported.
        seed: what is drawn depends on it alone (and on the version of hypothesis).
        replay: the line that a violation printed: judge that world and no other.
        only: the claims to judge, by name; by default all.

    Returns:
        How many worlds were judged.

    Raises:
        Violation: with a smallest world in which a claim fails.
        UsageError: if an argument makes no sense.

    >>> from isozyme.moe.dispatch_alltoall import AllToAllDispatcher
    >>> check_dispatcher(lambda place: AllToAllDispatcher(place.placement), examples=4).worlds
    6
    """
    chosen = promises or (ISOZYME if style == "isozyme" else TORCH)
    judge = DispatcherJudge(Subject(factory=factory, style=style), chosen, known_claims(only))
    return _judged(judge, examples=examples, seconds=seconds, seed=seed, line=replay)


def _judged(judge: DispatcherJudge, *, examples: int, seconds: float, seed: int, line: str | None) -> Report:
    """First all worlds by what one run shows, which is quick, then half as many by comparing runs.

    Of the latter an eighth of `examples` are crowded worlds instead, again by what one run shows.
    """
    if line is not None:
        return replay_world(parse(line), judge)
    drawn = worlds(judge.promises)
    quick = replace(judge, claims=[name for name in judge.claims if name not in OF_SEVERAL_RUNS])
    many = examples // 8
    parts: tuple[tuple[Any, DispatcherJudge, int], ...] = (
        (drawn, quick, examples),
        (worlds(judge.promises, crowded=True), quick, many),
        (drawn, judge, -(-examples // 2) - many),
    )
    reports: list[Report] = []
    for number, (strategy, judged, count) in enumerate(parts):
        left = max(seconds - sum(report.seconds for report in reports), 0.0)
        if count:
            reports.append(search(strategy, judged, examples=count, seconds=left, seed=seed + number))
    return Report(
        worlds=sum(report.worlds for report in reports),
        seconds=sum(report.seconds for report in reports),
        out_of_time=any(report.out_of_time for report in reports),
    )


def check_permutation(
    permute: Callable[[Tensor, Tensor, int], tuple[Tensor, Any, Any]],
    unpermute: Callable[[Tensor, Any], Tensor],
    *,
    promises: Promises | None = None,
    examples: int = 100,
    seconds: float = 10.0,
    seed: int = 0,
    replay: str | None = None,
    only: Collection[str] | None = None,
) -> Report:
    """Look for tokens that a local permutation loses or misplaces, in values or in gradients.

    A permutation is a dispatch on one rank: the same claims are asked, and the order of rows.

    Args:
        permute: from tokens `[T, H]`, expert ids `[T, K]` (-1 for a dropped slot, if promised) and E: the
            rows grouped by expert, the number of rows of each expert, and what `unpermute` needs.
        unpermute: from rows and that, for each token the sum of its rows.
        promises: by default unweighted, ordered, with drops.

    The other arguments and the errors are those of `check_dispatcher`.
    """

    class OneRank:
        def __init__(self, place: Place) -> None:
            self._experts = place.num_experts

        def dispatch(self, tokens: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> tuple[Any, ...]:
            del topk_probs
            rows, counts, handle = permute(tokens, topk_ids, self._experts)
            return rows, counts, None, handle

        def combine(self, rows: Tensor, handle: Any) -> Tensor:
            return unpermute(rows, handle)

    chosen = promises or Promises(drops=True, ordered=True, experts_per_rank=6)
    chosen = replace(chosen, ranks=1, weighted=False, etp=False)
    judge = DispatcherJudge(Subject(factory=OneRank, style="torch"), chosen, known_claims(only))
    return _judged(judge, examples=examples, seconds=seconds, seed=seed, line=replay)


def known_claims(only: Collection[str] | None) -> Collection[str]:
    """The claims to judge, all if None.

    Raises:
        UsageError: for a name that is not one of `CLAIMS`.
    """
    for name in only or ():
        if name not in CLAIMS:
            raise UsageError(f"only must name claims: only={name!r}. {did_you_mean(name, CLAIMS)}")
    return CLAIMS if only is None else only


@dataclass(frozen=True)
class DispatcherJudge:
    """Judges a dispatcher in one world."""

    subject: Subject
    promises: Promises
    claims: Collection[str]

    def __call__(self, world: World) -> None:
        """Run the world, as often as the claims need, and raise the first violation with a picture."""
        run: Run | None = None
        expected: Expected | None = None
        try:
            inputs = inputs_of(world)
            if not self.promises.weighted:
                inputs = reweighted(inputs, scale=0.0, add=1.0)
            expected = dense_loop(world, inputs, experts_of(world))
            (run,) = observe(self.subject, world, Step(inputs=inputs))
            self._one_run(world, run, expected)
            if not OF_SEVERAL_RUNS.isdisjoint(self.claims):
                self._several_runs(world, run)
        except Violation as violation:
            violation.draw = partial(picture, world, run, expected)
            raise

    def _one_run(self, world: World, run: Run, expected: Expected) -> None:
        """The claims about a single run, what arrived first."""
        asked = self._asked
        if asked("inputs_are_not_mutated"):
            results.inputs_are_not_mutated(world, run)
        if asked("filler_weighs_nothing"):
            arrivals.filler_weighs_nothing(world, run, allowed=self.promises.filler)
        for claim in (
            arrivals.every_row_was_sent,
            arrivals.rows_stand_under_their_expert,
            arrivals.every_kept_slot_arrives_once,
        ):
            if asked(claim.__name__):
                claim(world, run)
        if asked("weights_travel_with_their_rows") and self.promises.weighted:
            arrivals.weights_travel_with_their_rows(world, run)
        if asked("rows_are_in_order") and self.promises.ordered:
            arrivals.rows_are_in_order(world, run)
        if asked("an_output_is_like_its_input"):
            results.an_output_is_like_its_input(world, run)
        for compared in (
            results.outputs_equal_the_dense_loop,
            results.token_gradients_equal_the_dense_loop,
            results.weight_gradients_equal_the_dense_loop,
            results.expert_gradients_equal_the_dense_loop,
        ):
            if asked(compared.__name__) and (self.promises.weighted or "weight" not in compared.__name__):
                compared(world, run, expected)
        if asked("empty_experts_get_zero_gradients"):
            results.empty_experts_get_zero_gradients(world, run)
        if asked("ranks_make_the_same_calls") and self.promises.same_calls:
            results.ranks_make_the_same_calls(world, run)

    def _several_runs(self, world: World, run: Run) -> None:
        """The claims that compare runs."""
        asked, subject, inputs = self._asked, self.subject, run.inputs
        ones = reweighted(inputs, scale=0.0, add=1.0)
        plain, q, p_plus_q, again = observe(
            subject,
            world,
            Step(inputs=ones, identity=True, backward=False),
            Step(inputs=ones, backward=False),
            Step(inputs=reweighted(inputs, scale=1.0, add=1.0), backward=False),
            Step(inputs=inputs),
        )
        if asked("identity_experts_return_the_tokens"):
            results.identity_experts_return_the_tokens(world, plain)
        if asked("outputs_are_linear_in_the_weights") and self.promises.weighted:
            results.outputs_are_linear_in_the_weights(world, run, q, p_plus_q)
        if asked("sums_are_rounded_once") and self.promises.wide_sums:
            self._sums_in_bf16(world)
        if asked("a_second_step_repeats_the_first"):
            results.a_second_step_repeats_the_first(world, run, again)
        if asked("the_schedule_does_not_matter") and world.ranks > 1:
            (other,) = observe(subject, replace(world, schedule=LAST_FIRST, delay=None), Step(inputs=inputs))
            results.the_schedule_does_not_matter(world, run, other)
        # With ETP the sum over the parts of an expert is another expert on one rank.
        if asked("the_layout_does_not_matter") and world.ranks > 1 and world.topology.size("etp") == 1:
            one = dealt(inputs, 1)
            here = on_one_rank(world, one[0].ids.tolist(), (~one[0].kept).nonzero().tolist())
            (elsewhere,) = observe(subject, here, Step(inputs=one))
            results.the_layout_does_not_matter(world, run, elsewhere)

    def _sums_in_bf16(self, world: World) -> None:
        """Three results a token: a large one, one that is lost beside it, and the opposite of the large one.

        They come from one rank, or from three: with two, the sum of one may be rounded before it is sent.
        """
        if self.promises.topk < 3:
            return
        ranks = 3 if world.ranks > 1 and self.promises.ranks > 2 else 1
        local = world.num_experts // world.topology.size("ep") if ranks > 1 else max(world.num_experts, 3)
        apart = local if ranks > 1 else 1
        sizes = [len(world.ids[rank % world.ranks]) for rank in range(ranks)]
        factors = tuple({0: 1.0, apart: 2.0**-9}.get(expert, -1.0) for expert in range(ranks * local))
        world = World(
            layout=Layout(dp=ranks, ep=ranks),
            num_experts=ranks * local,
            topk=3,
            ids=tuple(((0, apart, 2 * apart),) * size for size in sizes),
            dtype="bfloat16",
            schedule=world.schedule,
        )
        step = Step(inputs=inputs_of(world), identity=True, backward=False, factors=factors)
        (run,) = observe(self.subject, world, step)
        results.sums_are_rounded_once(world, run, factors)

    def _asked(self, claim: str) -> bool:
        return claim in self.claims
