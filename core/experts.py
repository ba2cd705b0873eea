"""The configuration of mixture-of-experts layers: router, sizes, capacity, dispatcher and backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from isozyme.core.errors import Rules, divisors

ExpertBackend = Literal[
    "auto",
    "loop",
    "grouped_mm",
    "grouped_mm_fused",
    "grouped_fp8",
    "te",
    "te_fused",
    "te_ops",
    "mxfp8_emulated",
]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a token chooses its experts, and what keeps the choice balanced."""

    num_experts: int = 8
    topk: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Score function over the logits, applied before the top-k."""
    renormalize: bool = True
    """Divide the chosen scores by their sum (with softmax this equals a softmax over the chosen logits)."""
    scaling_factor: float = 1.0
    """Multiplies the combine weights."""
    num_groups: int = 1
    """Group-limited routing: experts form this many groups …"""
    topk_groups: int = 1
    """… and a token chooses among the experts of its best groups only."""
    aux_loss: float = 0.01
    """Coefficient of the load-balance loss."""
    aux_scope: Literal["sequence", "microbatch", "global_lagged"] = "sequence"
    """What the balance loss calls the load: that of each window, of the micro-batch, or of the whole previous
    step (which then is saved with the weights)."""
    z_loss: float = 0.0
    """Coefficient of the router z-loss."""
    expert_bias_rate: float = 0.0
    """Step of the loss-free balance bias added to the scores for selection alone; 0 turns it off."""

    def problems(self, where: str = "model.moe.router") -> list[str]:
        """Every broken rule in words."""
        rules = Rules(where)
        experts, topk = self.num_experts, self.topk
        rules.check(experts >= 1, f"{where}.num_experts must be at least 1: {where}.num_experts={experts}.")
        possible = rules.check(
            1 <= topk <= max(experts, 1),
            f"topk must be between 1 and num_experts: {where}.topk={topk}, {where}.num_experts={experts}. "
            f"Choose topk from 1 to {experts}.",
        )
        for name in ("aux_loss", "z_loss", "expert_bias_rate"):
            value = getattr(self, name)
            rules.check(
                value >= 0, f"{where}.{name} must not be negative: {where}.{name}={value}. Use 0 for off."
            )
        rules.check(
            self.scaling_factor > 0,
            f"{where}.scaling_factor must be positive: {where}.scaling_factor={self.scaling_factor}.",
        )
        if rules.check(
            self.num_groups >= 1 and experts >= 1 and experts % max(self.num_groups, 1) == 0,
            f"num_groups must divide num_experts: {where}.num_groups={self.num_groups}, "
            f"{where}.num_experts={experts}. Choose from {', '.join(map(str, divisors(max(experts, 1))))}.",
        ):
            rules.check(
                1 <= self.topk_groups <= self.num_groups,
                f"topk_groups must be between 1 and num_groups: {where}.topk_groups={self.topk_groups}, "
                f"{where}.num_groups={self.num_groups}.",
            )
            reachable = experts // self.num_groups * self.topk_groups
            rules.check(
                topk <= reachable or not possible,
                f"topk must not exceed the experts of the chosen groups: {where}.topk={topk}; "
                f"{self.topk_groups} groups x {experts // self.num_groups} experts = {reachable}. "
                "Lower topk or raise topk_groups.",
            )
        return rules.broken


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One mixture-of-experts layer."""

    router: RouterConfig = field(default_factory=RouterConfig)
    ffn: int = 1024
    """F, the hidden width of one expert."""
    shared_ffn: int = 0
    """Hidden width of a shared expert that every token passes; 0 for none."""
    capacity_factor: float | None = None
    """Dropless if null; else an expert keeps ceil(factor * topk * window / num_experts) slots a window."""
    drop_policy: Literal["probability", "position"] = "probability"
    """Which slots an over-full expert keeps: the largest combine weights, or the first positions."""
    pad_to_capacity: bool = False
    """Exchange fixed-size buffers of exactly the capacity, instead of ragged rows."""
    dispatcher: Literal["auto", "local", "allgather", "alltoall"] = "auto"
    equal_tokens: bool = False
    """Say that all ranks hold equally many tokens in every call, as those of a training run do; then the
    all-gather dispatcher need not ask, and wait for the answer."""
    experts: ExpertBackend = "auto"
    overlap_shared: bool = True
    """Compute the shared expert while rows are exchanged; else after that."""
    delay_wgrad: bool = False
    """In backward, compute the experts' weight gradients while the rows' gradients are exchanged."""
    cache_quantized_weights: bool = False
    """Keep the experts' quantised weights over the micro-batches of a step, or quantise each time.

    Costs one or two bytes a weight of this rank's experts from step to step. With fp8_delayed the kept copy
    also keeps the scale of the step's first micro-batch."""

    def problems(self, where: str = "model.moe") -> list[str]:
        """Every broken rule in words."""
        rules = Rules(where)
        rules.extend(self.router.problems(f"{where}.router"))
        rules.check(self.ffn >= 1, f"{where}.ffn must be at least 1: {where}.ffn={self.ffn}.")
        rules.check(self.shared_ffn >= 0, f"{where}.shared_ffn must not be negative: {self.shared_ffn}.")
        factor = self.capacity_factor
        rules.check(
            factor is None or factor > 0,
            f"capacity_factor must be positive, or null for dropless: {where}.capacity_factor={factor}.",
        )
        rules.check(
            factor is not None or not self.pad_to_capacity,
            f"pad_to_capacity needs a capacity: {where}.capacity_factor=null. Set it, for instance 1.25.",
        )
        rules.check(
            self.dispatcher == "allgather" or not self.equal_tokens,
            f"equal_tokens is for the all-gather dispatcher: {where}.equal_tokens=true, "
            f"{where}.dispatcher={self.dispatcher}. Leave it out, or set dispatcher=allgather.",
        )
        return rules.broken
