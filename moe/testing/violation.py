"""The one exception of the toolkit, and the list of claims that it can refute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from isozyme.core.errors import IsozymeError

CLAIMS: Mapping[str, str] = MappingProxyType(
    {
        # In the order of precedence: of several violations the first one listed is reported in full.
        "a_world_repeats": "the same world gives the same result each time: no state outlives a run",
        "the_program_runs_to_its_end": "no rank raises an error, in forward or backward",
        "ranks_agree_about_their_calls": "the ranks of a group make the same collectives, in one order",
        "ranks_make_the_same_calls": "every rank makes the same calls, whatever its counts",
        "inputs_are_not_mutated": "tokens, expert ids, weights and incoming gradients are left as they were",
        "counts_describe_the_rows": "tokens_per_expert has one entry a local expert and sums to the rows",
        "every_row_was_sent": "every arrived row is, bit for bit, a token that some rank of the group sent",
        "rows_stand_under_their_expert": "a row under expert e belongs to a token that chose e",
        "every_kept_slot_arrives_once": "each kept slot arrives once on each rank that holds its expert",
        "weights_travel_with_their_rows": "a row's combine weight is that of the slot that it comes from",
        "rows_are_in_order": "an expert's rows are in the order of source rank, then token",
        "filler_weighs_nothing": "rows that no slot was sent for are zeros with weight zero",
        "an_output_is_like_its_input": "the result has the shape and the dtype of the tokens",
        "outputs_equal_the_dense_loop": "each token gets the weighted sum of what its own experts make of it",
        "token_gradients_equal_the_dense_loop": "the gradient of a token is the sum over its kept slots",
        "weight_gradients_equal_the_dense_loop": "a combine weight has its own row's gradient, 0 if dropped",
        "expert_gradients_equal_the_dense_loop": "an expert's gradient is the sum over its rows, no average",
        "empty_experts_get_zero_gradients": "an expert without rows gets a gradient, and it is exactly zero",
        "identity_experts_return_the_tokens": "with experts that change nothing, tokens come back unchanged",
        "outputs_are_linear_in_the_weights": "f(p + q) = f(p) + f(q) for combine weights p and q",
        "sums_are_rounded_once": "a token's results are added in at least fp32, then rounded to its dtype",
        "a_second_step_repeats_the_first": "the same object gives the same results when it is used again",
        "the_schedule_does_not_matter": "results are the same, bit for bit, whichever rank runs first",
        "the_layout_does_not_matter": "the same global model and batch give the same results on other ranks",
        # Routers
        "ids_are_legal": "expert ids are integers in range, distinct within a token, in the shape [T, K]",
        "the_best_experts_are_chosen": "a token gets its K best experts, best first, ties to the lower id",
        "weights_equal_the_definition": "combine weights equal those of the definition, in at least fp32",
        "logit_gradients_equal_the_definition": "gradients of the logits equal those of the definition",
        "tokens_are_routed_alone": "a token's routing depends on no other token of the call",
        "bad_logits_stay_visible_and_alone": "a NaN or infinite logit shows in its token's weights only",
        # Capacity
        "capacity_is_exact": "an expert keeps min(its slots, capacity) of them",
        "the_right_slots_are_kept": "kept slots come before the dropped ones in the order of the policy",
        # Layers
        "every_parameter_gets_a_gradient": "every rank has a gradient for each of its parameters",
        "replicas_agree": "ranks that hold the same parameter have the same gradient",
        "padding_touches_nothing": "what padding holds, NaN included, reaches no output and no gradient",
    }
)
"""What is claimed, by the name of the function that checks it."""


class Violation(IsozymeError, AssertionError):
    """A claim does not hold, and here is a smallest world in which it does not.

    Args:
        invariant: the name of the claim, a key of `CLAIMS`.
        finding: what was found, where.
    """

    def __init__(self, invariant: str, finding: str) -> None:
        assert invariant in CLAIMS, invariant
        super().__init__(invariant, finding)
        self.invariant, self.finding = invariant, finding
        self.replay = ""
        """The line that makes the same world again."""
        self.draw: Callable[[], str] | None = None
        """Draws the world as plain text of at most 40 lines."""
        self.others: Sequence[Violation] = ()
        """Other claims that were refuted in the same search, each by its own smallest world."""

    @property
    def picture(self) -> str:
        """The world as plain text of at most 40 lines, if there is one."""
        return "" if self.draw is None else self.draw()

    @property
    def claim(self) -> str:
        """What was claimed, in one sentence."""
        return CLAIMS[self.invariant]

    def __str__(self) -> str:
        lines = [f"{self.invariant}: {self.finding}", f"  claimed: {self.claim}"]
        if self.draw is not None:
            lines += ["", self.picture]
        if self.replay:
            lines += ["", f"replay={self.replay!r}"]
        for other in self.others:
            lines += ["", f"also {other.invariant}: {other.finding}", f"replay={other.replay!r}"]
        return "\n".join(lines)
