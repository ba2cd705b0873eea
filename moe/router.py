"""The router: one linear map from tokens to experts, and the choice that follows from it.

A forward changes nothing: what it counted goes out as `RouterStats`, so recomputing a layer or evaluating it
counts nothing twice. Its buffers (balance bias, lagged counts) change between steps alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.config import RouterConfig
from isozyme.core.errors import ConfigError, Rules
from isozyme.core.initialisation import Init
from isozyme.moe.capacity import window_length
from isozyme.moe.expert_bias import PreciseBuffers, create_expert_bias
from isozyme.moe.kernels.router_topk import MAX_EXPERTS, count_choices, router_topk
from isozyme.moe.lagged_counts import create_lagged_counts
from isozyme.moe.losses import balance_loss, expert_counts, z_loss
from isozyme.moe.router_logits import bf16_logits
from isozyme.moe.scores import (
    RoutingFlips,
    combine_weights,
    log_scores,
    normalized_scores,
    routing_flips,
    select_experts,
    selection_scores,
)
from isozyme.moe.types import RouterStats, Routing
from isozyme.parallel.parameters import create_parameter
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import dense_spec


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """What a choice of experts consists of, whichever code made it."""

    shares: Float[Tensor, "T E"]
    """Scores that sum to one over the experts, with gradient; zero for padding."""
    ids: Int[Tensor, "T K"]
    weights: Float[Tensor, "T K"]
    """Combine weights, with gradient; zero for padding."""
    log_sum: Float[Tensor, "T"] | None
    """Log-sum-exp of the logits, with gradient; None where there is no z-loss."""
    counts: Int[Tensor, "W E1"]
    """Slots of each expert, and real tokens, of each window, before any drop."""


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turns autocast off; leaving out the context where it is off already spares every layer its price."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


class Router(PreciseBuffers):
    """Chooses `topk` of `num_experts` experts for each token, and weighs them.

    Logits, scores, weights and losses are computed in at least fp32, autocast or not. Each rank routes its
    own tokens; every rank holds the whole weight, and its gradient is a part of the sum over TP, CP and DP.

    Args:
        config: how to choose and what to balance.
        name: global canonical name of the router, such as `layers.3.moe.router`.
        hidden: H, the width of a token.
        groups: this rank's groups.
        seed: seed of the model; None leaves the weight unset, for someone who fills it.
        init_std: standard deviation of the initial weight.
        device: where the weight lives.
        dtype: type of the weight; the expert bias is at least fp32.

    Raises:
        ConfigError: if the configuration breaks a rule.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        name: str,
        hidden: int,
        groups: ProcessGroups,
        seed: int | None,
        init_std: float = 0.02,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        rules = Rules(name)
        rules.extend(config.problems())
        rules.raise_if_broken()
        self.config = config
        self.groups = groups
        spec = dense_spec(f"{name}.weight", (config.num_experts, hidden), Init.normal(init_std))
        self.weight = create_parameter(spec, groups, seed=seed, device=device, dtype=dtype)
        bias = None
        if config.expert_bias_rate > 0:
            bias = create_expert_bias(
                f"{name}.expert_bias", config.num_experts, groups, device=device, dtype=dtype
            )
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", bias)
        lagged = None
        if config.aux_scope == "global_lagged" and config.aux_loss > 0:
            lagged = create_lagged_counts(f"{name}.lagged_counts", config.num_experts, groups, device=device)
        self.lagged_counts: Tensor | None
        self.register_buffer("lagged_counts", lagged)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        config = self.config
        return f"num_experts={config.num_experts}, topk={config.topk}, score={config.score}"

    def logits(self, tokens: Float[Tensor, "T H"], token_valid: Bool[Tensor, "T"]) -> Float[Tensor, "T E"]:
        """The product of tokens and weight in at least fp32; zeros for padding, whatever it holds."""
        dtype = torch.promote_types(torch.promote_types(tokens.dtype, self.weight.dtype), torch.float32)
        with _no_autocast(tokens.device):
            if tokens.dtype == self.weight.dtype == torch.bfloat16:
                return bf16_logits(tokens, self.weight, token_valid)
            # Padding may hold anything, NaN included: not even a zero gradient may be multiplied by it.
            real = torch.where(token_valid[:, None], tokens, 0.0)
            return F.linear(real.to(dtype), self.weight.to(dtype))

    def forward(
        self,
        tokens: Float[Tensor, "T H"],
        token_valid: Bool[Tensor, "T"],
        windows: int,
        routing_override: Routing | None = None,
        *,
        lagged_counts: Int[Tensor, "E"] | None = None,
    ) -> tuple[Routing, RouterStats]:
        """Route this rank's tokens.

        A token whose logits are not all finite still gets valid, distinct expert ids; its weights are NaN, so
        that the step's check for non-finite values finds it. Other tokens are not affected.

        With an auxiliary loss, the ranks of the CP x TP group call it together: they hold shares of the same
        windows, and their counts are summed (one all-reduce of `windows * (E + 1)` integers).

        Args:
            tokens: this rank's tokens, window by window.
            token_valid: which tokens are real; padding gets valid ids, is not kept, weighs nothing and is
                not counted.
            windows: sequence windows in this call, of which the tokens are equal shares.
            routing_override: a routing to replay: its ids and `kept` are used, the weights are recomputed
                from the present scores, with gradient.
            lagged_counts: `[E]`, the previous step's slots over all ranks, for `aux_scope=global_lagged`; by
                default those that `update_lagged_counts` noted.

        Returns:
            The routing, and this rank's statistics. `routed` counts slots before any drop; `dropped` is zero
            unless a replayed routing had dropped some.

        Raises:
            ConfigError: if the tokens are not whole windows, or the override belongs to other tokens.
        """
        config = self.config
        window_length(tokens.shape[0], windows)
        logits = self.logits(tokens, token_valid)
        with _no_autocast(tokens.device):
            real = token_valid[:, None].expand(-1, config.topk)
            if routing_override is None:
                choice, kept = self._choose(logits, token_valid, windows, None), real.contiguous()
                probs = choice.weights
            else:
                self._check_override(routing_override, tokens.shape[0])
                choice = self._choose(logits, token_valid, windows, routing_override.topk_ids)
                kept = routing_override.kept & real
                probs = torch.where(kept, choice.weights, 0.0)
            ids = choice.ids
            routing = Routing(topk_ids=ids, topk_probs=probs, kept=kept, num_experts=config.num_experts)
            stats = RouterStats(
                aux_loss=self._balance_loss(choice, token_valid, windows, lagged_counts),
                z_loss=self._z_loss(choice, token_valid),
                routed=choice.counts[:, :-1].sum(dim=0),
                dropped=(
                    ids.new_zeros(config.num_experts)
                    if routing_override is None
                    else expert_counts(ids, real & ~kept, config.num_experts)
                ),
            )
        return routing, stats

    def _choose(
        self,
        logits: Float[Tensor, "T E"],
        token_valid: Bool[Tensor, "T"],
        windows: int,
        ids: Int[Tensor, "T K"] | None,
    ) -> _Choice:
        """Choose experts, or take the given ones, and weigh and count them; by one kernel if there is one."""
        config = self.config
        if ids is None and self._has_kernel(logits):
            setting = (config.topk, config.renormalize, config.scaling_factor)
            shares, ids, weights, log_sum, counts = router_topk(logits, token_valid, windows, *setting)
            used = log_sum if config.z_loss > 0 else None
            return _Choice(shares=shares, ids=ids, weights=weights, log_sum=used, counts=counts)
        log_score, real = log_scores(logits, config.score), token_valid[:, None]
        if ids is None:
            ids = select_experts(selection_scores(log_score, self.expert_bias), config)
        return _Choice(
            shares=torch.where(real, normalized_scores(log_score, config.score), 0.0),
            ids=ids,
            weights=torch.where(real, combine_weights(log_score, ids, config), 0.0),
            log_sum=logits.logsumexp(dim=-1) if config.z_loss > 0 else None,
            counts=count_choices(ids, token_valid, windows, config.num_experts),
        )

    def _has_kernel(self, logits: Tensor) -> bool:
        plain = self.config.score == "softmax" and self.config.num_groups == 1 and self.expert_bias is None
        return logits.is_cuda and plain and logits.shape[1] <= MAX_EXPERTS

    @torch.no_grad()
    def routing_flips(
        self, tokens: Float[Tensor, "T H"], token_valid: Bool[Tensor, "T"], override: Routing
    ) -> RoutingFlips:
        """The tokens that would choose other experts than `override` did, with the gap of their scores.

        Raises:
            ConfigError: if the override belongs to other tokens.
        """
        self._check_override(override, tokens.shape[0])
        log_score = log_scores(self.logits(tokens, token_valid), self.config.score)
        selection = selection_scores(log_score, self.expert_bias)
        return routing_flips(selection, override.topk_ids, token_valid, self.config)

    def _balance_loss(
        self,
        choice: _Choice,
        token_valid: Bool[Tensor, "T"],
        windows: int,
        lagged_counts: Int[Tensor, "E"] | None,
    ) -> Float[Tensor, ""]:
        if self.config.aux_loss == 0:
            return choice.shares.new_zeros(())
        if lagged_counts is None and self.lagged_counts is not None:
            lagged_counts = self.lagged_counts.long()
        return balance_loss(
            choice.shares,
            choice.ids,
            token_valid,
            windows,
            coefficient=self.config.aux_loss,
            scope=self.config.aux_scope,
            group=self.groups["tp", "cp"],
            lagged_counts=lagged_counts,
            own_counts=choice.counts,
            masked=True,
        )

    def _z_loss(self, choice: _Choice, token_valid: Bool[Tensor, "T"]) -> Float[Tensor, ""]:
        if choice.log_sum is None:
            return choice.shares.new_zeros(())
        return z_loss(choice.log_sum, token_valid, coefficient=self.config.z_loss)

    def _check_override(self, override: Routing, num_tokens: int) -> None:
        config = self.config
        given = (override.num_tokens, override.topk, override.num_experts)
        here = (num_tokens, config.topk, config.num_experts)
        if given != here:
            raise ConfigError(
                "a replayed routing must belong to the same tokens and router: routing_override has "
                f"(tokens, topk, num_experts)={given}; here they are {here}. "
                "Record it with this batch and model."
            )
