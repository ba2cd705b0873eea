"""The mixture-of-experts layer: route → cut to capacity → dispatch → experts → combine (+ shared expert)."""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from isozyme.core.config import MoEConfig, Precision
from isozyme.core.errors import Rules
from isozyme.moe.capacity import apply_capacity, expert_capacity
from isozyme.moe.dispatch import choose_dispatcher
from isozyme.moe.dispatch_padded import PaddedAllToAllDispatcher
from isozyme.moe.experts.experts import Experts
from isozyme.moe.grouping import ArrivalDispatcher
from isozyme.moe.placement import ExpertPlacement
from isozyme.moe.router import Router
from isozyme.moe.shared_expert import SharedExpert
from isozyme.moe.types import MoEOutput, RouterStats, Routing
from isozyme.parallel.process_groups import ProcessGroups


class MoELayer(nn.Module):
    """Replaces the dense network of a transformer layer.

    Args:
        config: router, sizes, capacity, dispatcher and backend.
        name: global name, such as `layers.3.moe`.
        hidden: H, the width of a token.
        groups: the communicators of this rank.
        seed: seed of the model; None leaves random weights unset, for someone who fills them.
        init_std: standard deviation of the router's and the gate-up weights.
        output_std: standard deviation of the down projections.
        precision: precision of the experts' GEMMs; that of `dtype` if None.
        device: where the weights are.
        dtype: their type.
        recompute_activation: make the experts' activations a second time in backward, instead of keeping
            them (backends with a kernel of their own for it keep none, or decide for themselves).

    Attributes:
        choices: what `auto` chose and why, by part.

    Raises:
        ConfigError: if the configuration breaks a rule, or does not fit the layout.
        BackendError: if the experts' backend cannot run here.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        name: str,
        hidden: int,
        groups: ProcessGroups,
        seed: int | None,
        init_std: float = 0.02,
        output_std: float = 0.02,
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        _check(config, name)
        self.config, self.groups = config, groups
        self.router = Router(
            config.router,
            name=f"{name}.router",
            hidden=hidden,
            groups=groups,
            seed=seed,
            init_std=init_std,
            device=device,
            dtype=dtype,
        )
        self.placement = ExpertPlacement.of(groups, config.router.num_experts)
        self.dispatcher, self._dispatcher_choice = choose_dispatcher(
            config.dispatcher, self.placement, equal_tokens=config.equal_tokens
        )
        self.experts = Experts(
            name=name,
            num_experts=config.router.num_experts,
            hidden=hidden,
            ffn=config.ffn,
            groups=groups,
            seed=seed,
            init_std=init_std,
            output_std=output_std,
            backend=config.experts,
            precision=precision,
            device=device,
            dtype=dtype,
            recompute=recompute_activation,
            delay_wgrad=config.delay_wgrad,
            cache_quantized=config.cache_quantized_weights,
        )
        self.shared_expert: SharedExpert | None = None
        if config.shared_ffn:
            self.shared_expert = SharedExpert(
                name=f"{name}.shared_expert",
                hidden=hidden,
                ffn=config.shared_ffn,
                groups=groups,
                seed=seed,
                init_std=init_std,
                output_std=output_std,
                device=device,
                dtype=dtype,
                recompute=recompute_activation,
            )

    @property
    def choices(self) -> dict[str, str]:
        """What was chosen for each part, and why."""
        if self.config.pad_to_capacity:
            return {"dispatcher": "padded alltoall (pad_to_capacity)", "experts": self.experts.choice}
        return {"dispatcher": self._dispatcher_choice, "experts": self.experts.choice}

    def forward(
        self,
        tokens: Float[Tensor, "B S H"],
        token_valid: Bool[Tensor, "B S"],
        routing_override: Routing | None = None,
        *,
        positions: Int[Tensor, "B S"] | None = None,
        lagged_counts: Int[Tensor, "E"] | None = None,
    ) -> MoEOutput:
        """Send this rank's tokens through their experts.

        All ranks of the layer's groups call it together, each with its part of B windows: the ranks of
        CP x TP hold equal parts of the same windows. Padding gets zeros, whatever it holds.

        Args:
            tokens: this rank's tokens; S is its part of a window.
            token_valid: which are real.
            routing_override: a routing to replay (its ids and `kept`); weights are computed anew.
            positions: place of each token in its whole window, where CP does not cut it into contiguous
                parts; only the capacity needs it.
            lagged_counts: the previous step's slots of each expert, for `aux_scope=global_lagged`.

        Raises:
            ConfigError: if the override belongs to other tokens.
        """
        windows, length = token_valid.shape
        flat = rearrange(tokens, "b s h -> (b s) h")
        routing, stats = self.router(
            flat,
            rearrange(token_valid, "b s -> (b s)"),
            windows,
            routing_override,
            lagged_counts=lagged_counts,
        )
        capacity = self._capacity(length)
        if capacity is not None:
            routing, stats = self._cut(routing, stats, windows, capacity, positions)
        result = self._exchange(self._dispatcher(windows, length, capacity), flat, routing, token_valid)
        return MoEOutput(
            tokens=rearrange(result, "(b s) h -> b s h", b=windows, s=length),
            stats=stats,
            routing=routing,
            choices=self.choices,
        )

    def _exchange(
        self,
        dispatcher: ArrivalDispatcher,
        flat: Float[Tensor, "T H"],
        routing: Routing,
        token_valid: Bool[Tensor, "B S"],
    ) -> Float[Tensor, "T H"]:
        """Tokens to their experts and back, and the shared expert.

        What stands between a start and its finish runs while rows are under way; and in backward, where
        autograd runs what was computed later first, again: the weights' gradients that `stacks` delays,
        and the halves of the shared expert.
        """
        shared, early = self.shared_expert, self.config.overlap_shared
        real = flat
        if shared is not None:
            real = torch.where(rearrange(token_valid, "b s -> (b s) 1"), flat, 0.0)
        sending = dispatcher.send_start(flat, routing)
        stacks = self.experts.stacks()
        wide = shared.first_half(real) if shared is not None and early else None
        arrival = dispatcher.send_finish(sending)
        returning = dispatcher.bring_back_start(self.experts.on_arrival(arrival, stacks), arrival)
        beside = shared.second_half(wide, flat.dtype) if shared is not None and wide is not None else None
        result = dispatcher.bring_back_finish(returning)
        if shared is not None:
            result = result + (shared(real) if beside is None else beside)
        return result

    def _capacity(self, length: int) -> int | None:
        """C for windows of which this rank holds `length` tokens; None if dropless."""
        if self.config.capacity_factor is None:
            return None
        router = self.config.router
        return expert_capacity(
            self.config.capacity_factor,
            topk=router.topk,
            window=length * self.groups["tp", "cp"].size,
            num_experts=router.num_experts,
        )

    def _cut(
        self,
        routing: Routing,
        stats: RouterStats,
        windows: int,
        capacity: int,
        positions: Int[Tensor, "B S"] | None,
    ) -> tuple[Routing, RouterStats]:
        within = apply_capacity(
            routing,
            windows,
            capacity,
            self.config.drop_policy,
            groups=self.groups,
            positions=None if positions is None else rearrange(positions, "b s -> (b s)"),
        )
        return within.routing, replace(stats, dropped=stats.dropped + within.dropped)

    def _dispatcher(self, windows: int, length: int, capacity: int | None) -> ArrivalDispatcher:
        if not self.config.pad_to_capacity:
            return self.dispatcher
        assert capacity is not None  # a rule of MoEConfig
        # Of one window this rank sends an expert no more than the capacity, nor more than its own tokens.
        return PaddedAllToAllDispatcher(self.placement, min(capacity, length) * windows)


def _check(config: MoEConfig, name: str) -> None:
    rules = Rules(name)
    rules.extend(config.problems())
    rules.check(
        not config.pad_to_capacity or config.dispatcher in ("auto", "alltoall"),
        "pad_to_capacity exchanges fixed-size buffers by all-to-all: model.moe.pad_to_capacity=true, "
        f"model.moe.dispatcher={config.dispatcher}. Use alltoall or auto.",
    )
    rules.raise_if_broken()
