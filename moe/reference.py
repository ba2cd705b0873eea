"""Slow twins that are obviously right: routing one token at a time, and experts one after the other.

They define what the fast paths must compute. They know nothing of ranks: they take the global tensors.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.config import RouterConfig
from isozyme.moe.types import Routing


def reference_moe(
    tokens: Float[Tensor, "T H"],
    routing: Routing,
    gate_up: Float[Tensor, "E 2 F H"],
    down: Float[Tensor, "E H F"],
) -> Float[Tensor, "T H"]:
    """The weighted sum over each token's kept experts e of `down_e (silu(gate_e x) * (up_e x))`.

    Every expert sees every token that has at least one kept slot, and its result is multiplied by the weight
    with which the token chose it, zero for most: O(T·E), with gradients for all inputs. Computed in at least
    fp32, returned in the type of `tokens`; zeros for a token without kept slots.
    """
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    output = torch.zeros(tokens.shape, dtype=dtype, device=tokens.device)
    busy = routing.kept.any(dim=1)
    x = tokens[busy].to(dtype)
    for expert in range(routing.num_experts):
        chose = (routing.topk_ids == expert) & routing.kept
        weight = torch.where(chose, routing.topk_probs, torch.zeros_like(routing.topk_probs)).sum(dim=1)
        gate, up = gate_up[expert].to(dtype)
        hidden = F.silu(x @ gate.T) * (x @ up.T)
        result = (hidden @ down[expert].to(dtype).T) * weight[busy].to(dtype)[:, None]
        output = output.index_add(0, busy.nonzero().flatten(), result)
    return output.to(tokens.dtype)


def reference_routing(
    logits: Float[Tensor, "T E"],
    config: RouterConfig,
    *,
    token_valid: Bool[Tensor, "T"] | None = None,
    expert_bias: Float[Tensor, "E"] | None = None,
) -> Routing:
    """Routing by the definition, in Python floats (fp64), without gradient; logits must be finite.

    All tokens are real by default, and the bias is zero.
    """
    bias = [0.0] * config.num_experts if expert_bias is None else expert_bias.tolist()
    valid = [True] * logits.shape[0] if token_valid is None else token_valid.tolist()
    ids, probs = [], []
    for row, real in zip(logits.tolist(), valid, strict=True):
        scores = _scores(row if real else [0.0] * config.num_experts, config)
        chosen = _choose([score + extra for score, extra in zip(scores, bias, strict=True)], config)
        weights = [scores[expert] for expert in chosen]
        if config.renormalize:
            weights = [weight / sum(weights) for weight in weights]
        ids.append(chosen)
        probs.append([weight * config.scaling_factor if real else 0.0 for weight in weights])
    shape = (logits.shape[0], config.topk)
    kept = torch.tensor(valid, dtype=torch.bool)[:, None].expand(shape).clone()
    return Routing(
        topk_ids=torch.tensor(ids, dtype=torch.int64).view(shape).to(logits.device),
        topk_probs=torch.tensor(probs, dtype=torch.float64).view(shape).to(logits.device),
        kept=kept.to(logits.device),
        num_experts=config.num_experts,
    )


def _scores(logits: list[float], config: RouterConfig) -> list[float]:
    if config.score == "sigmoid":
        return [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def _choose(selection: list[float], config: RouterConfig) -> list[int]:
    size = config.num_experts // config.num_groups
    members = [range(group * size, (group + 1) * size) for group in range(config.num_groups)]
    strength = [sum(sorted((selection[e] for e in experts), reverse=True)[:2]) for experts in members]
    groups = sorted(range(config.num_groups), key=lambda group: (-strength[group], group))
    eligible = [expert for group in groups[: config.topk_groups] for expert in members[group]]
    return sorted(eligible, key=lambda expert: (-selection[expert], expert))[: config.topk]
