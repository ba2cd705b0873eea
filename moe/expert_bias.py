"""The balance bias: one number an expert, added to the scores for selection alone, moved against the load.

Source: Wang et al. 2024, auxiliary-loss-free load balancing (arXiv 2408.15664), as in DeepSeek-V3. It is a
buffer, not a parameter: no gradient, no optimiser, no decay; identical on all ranks, and saved like a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from isozyme.core.errors import ConfigError
from isozyme.core.initialisation import Init
from isozyme.parallel.parameters import local_initial_value
from isozyme.parallel.process_groups import ProcessGroups
from isozyme.parallel.shard_spec import ShardSpec, attach, spec_of


def expert_buffer_spec(name: str, num_experts: int, *, min_dtype: torch.dtype = torch.float32) -> ShardSpec:
    """Ownership of one number an expert that a router keeps: whole and identical on every rank of a stage."""
    return ShardSpec(
        name=name,
        global_shape=(num_experts,),
        replicas={"tp": "identical", "cp": "identical", "dp": "identical"},
        init=Init.constant(0.0),
        decay=False,
        kind="buffer",
        min_dtype=min_dtype,
    )


class PreciseBuffers(nn.Module):
    """A module whose buffers keep their `ShardSpec`, and its `min_dtype`, when the module is cast or moved.

    `module.bfloat16()` leaves such a buffer as it is, storage included; `module.double()` widens it.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PreciseBuffers:
        owned = {name: buffer for name, buffer in self._buffers.items() if hasattr(buffer, "shard_spec")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in owned.items():
            after = self._buffers[name]
            assert before is not None
            assert after is not None
            spec = spec_of(before)
            if spec.min_dtype is not None and after.dtype.is_floating_point:
                wanted = torch.promote_types(after.dtype, spec.min_dtype)
                if after.dtype != wanted:
                    after = before.to(device=after.device, dtype=wanted)
            attach(after, spec)
            self._buffers[name] = after
        return self


def create_expert_bias(
    name: str, num_experts: int, groups: ProcessGroups, *, device: torch.device | str, dtype: torch.dtype
) -> Float[Tensor, "E"]:
    """A zero bias with its spec attached, in `dtype` or fp32, whichever is wider."""
    spec = expert_buffer_spec(name, num_experts)
    bias = local_initial_value(spec, groups, seed=0, device=device, dtype=dtype)
    attach(bias, spec)
    return bias


@torch.no_grad()
def bias_step(
    expert_bias: Float[Tensor, "*L E"], global_counts: Int[Tensor, "*L E"], rate: float
) -> Float[Tensor, "*L E"]:
    """How far the bias moves: `rate * sign(mean load - load of the expert)`.

    The sign is taken in integers: an expert at exactly the mean stays, and so do all if nothing was routed.
    """
    experts = global_counts.shape[-1]
    direction = (global_counts.sum(dim=-1, keepdim=True) - experts * global_counts).sign()
    return rate * direction.to(expert_bias.dtype)


@torch.no_grad()
def update_expert_biases(
    modules: Sequence[nn.Module], routed: Sequence[Int[Tensor, "E"]], groups: ProcessGroups, *, rate: float
) -> None:
    """Move the bias of several routers once, in place, from the slots routed in one optimiser step.

    All ranks of one pipeline stage call it together with the same routers in the same order.

    Args:
        modules: routers that have an `expert_bias`, with the same number of experts.
        routed: for each, `RouterStats.routed` summed over this rank's micro-batches. They are summed over
            TP x CP x DP here, in one all-reduce of integers: the biases stay bitwise equal on all ranks.
        groups: this rank's groups.
        rate: the step.

    Raises:
        ConfigError: if a module has no expert bias, or a router has no counts.
    """
    biases = [_bias_of(module) for module in modules]
    for bias, count in zip(biases, routed_by_all(len(biases), routed, groups), strict=True):
        bias.add_(bias_step(bias, count, rate))


def routed_by_all(
    routers: int, routed: Sequence[Int[Tensor, "E"]], groups: ProcessGroups
) -> Sequence[Int[Tensor, "E"]]:
    """What each of some routers routed, summed over TP x CP x DP in one all-reduce; none without routers.

    Raises:
        ConfigError: if there are not as many counts as routers.
    """
    if routers != len(routed):
        raise ConfigError(
            f"each router needs its counts: len(modules)={routers}, len(routed)={len(routed)}. Give one each."
        )
    if not routers:
        return ()
    counts = groups["tp", "cp", "dp"].all_reduce(torch.stack(list(routed)))
    return counts.unbind(0)


def update_expert_bias(
    module: nn.Module, routed: Int[Tensor, "E"], groups: ProcessGroups, *, rate: float
) -> None:
    """`update_expert_biases` for one router."""
    update_expert_biases([module], [routed], groups, rate=rate)


def _bias_of(module: nn.Module) -> Tensor:
    bias = getattr(module, "expert_bias", None)
    if not isinstance(bias, Tensor):
        raise ConfigError(
            f"an update needs an expert bias: {type(module).__name__}.expert_bias={bias}. "
            "Set expert_bias_rate above 0 when the router is built."
        )
    return bias
