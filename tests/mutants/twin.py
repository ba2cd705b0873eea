"""The mixture-of-experts layer by its definition: one token, one window and one expert after the other.

It knows no ranks and shares no code with the layer but the initial values, which it draws by their documented
rule (seed, global name, index). Property tests put it in the place of the one-rank layer, so that what is
wrong at every layout alike is found too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isozyme.core.config import MoEConfig
from isozyme.core.initialisation import Init, initial_shard

SEED, STD, BIAS_STEP, RATE = 1, 0.7, 0.3, 0.5


@dataclass(kw_only=True)
class Pass:
    """What one forward gives: outputs of the tokens, sums of the losses, and counts of slots by expert."""

    out: Tensor
    aux: Tensor
    z: Tensor
    routed: Tensor
    dropped: Tensor


class Twin:
    """The layer of `config` with fp64 weights on one rank.

    Args:
        config: the layer; softmax or sigmoid scores without groups.
        hidden: H.
        steps: whether a second micro-batch follows, with the bias updated between the two, the gradient is
            clipped to half its norm, and AdamW makes one update: what `subjects.Trained` does.
        worst: whether a token goes to the experts with the lowest scores: what `subjects.Replayed` does.
    """

    def __init__(self, config: MoEConfig, hidden: int, *, steps: bool, worst: bool) -> None:
        self.config, self.steps, self.worst = config, steps, worst
        experts, ffn = config.router.num_experts, config.ffn
        shapes = {"router.weight": (0, (experts, hidden))}
        for number in range(experts):
            shapes[f"experts.{number}.gate_up"] = (1, (2, ffn, hidden))
            shapes[f"experts.{number}.down"] = (1, (hidden, ffn))
        if config.shared_ffn:
            shapes["shared_expert.gate_up"] = (1, (2, config.shared_ffn, hidden))
            shapes["shared_expert.down"] = (1, (hidden, config.shared_ffn))
        self.weights = {name: _drawn(f"moe.{name}", shape, dim) for name, (dim, shape) in shapes.items()}
        self.bias = torch.zeros(experts, dtype=torch.float64)
        self.passes: list[Pass] = []

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the tokens, and both losses."""
        self.given = tokens.detach(), valid
        found = self._pass(tokens, valid)
        return found.out, found.aux + found.z

    def gradients(self) -> Mapping[str, Tensor | None]:
        """Of all weights; with them, the sums of the losses and the counts of slots."""
        if self.steps:
            counts = self.passes[0].routed
            self.bias += self.config.router.expert_bias_rate * (counts.sum() - len(counts) * counts).sign()
            tokens, valid = self.given
            second = self._pass(tokens, valid)
            ((second.out * valid[..., None]).square().sum() + second.aux + second.z).backward()
        found: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            found[f"moe.{name}"] = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if self.steps:
            norm = torch.stack([grad.square().sum() for grad in found.values()]).sum().sqrt()
            found = {name: grad / 2 for name, grad in found.items()}
            for name, weight in self.weights.items():
                grad = found[f"moe.{name}"]
                found[f"moe.{name}, updated"] = weight.detach() - RATE * grad / (grad.abs() + 1)
            found["norm"] = norm
        if self.config.router.expert_bias_rate:
            found["moe.router.expert_bias"] = self.bias
        for name in ("aux", "z", "routed", "dropped"):
            found[name] = torch.stack([getattr(each, name).detach().double() for each in self.passes])
        return found

    def _pass(self, tokens: Tensor, valid: Tensor) -> Pass:
        router, length = self.config.router, valid.shape[1]
        experts = router.num_experts
        zero = 0 * self.weights["router.weight"].sum()  # on the graph, also without a token
        total = Pass(
            out=torch.where(valid[..., None], tokens, 0.0) * 0,
            aux=zero,
            z=zero,
            routed=torch.zeros(experts, dtype=torch.float64),
            dropped=torch.zeros(experts, dtype=torch.float64),
        )
        rows: dict[tuple[int, int], Tensor] = {}
        for window in range(len(tokens)):
            real = [place for place in range(length) if valid[window, place]]
            slots: list[tuple[int, int, Tensor]] = []
            mean_share = torch.zeros(experts, dtype=torch.float64)
            chose = [0] * experts
            for place in real:
                logits = self.weights["router.weight"] @ tokens[window, place]
                scores = logits.softmax(0) if router.score == "softmax" else logits.sigmoid()
                biased = ((scores.detach() + self.bias) * (-1 if self.worst else 1)).tolist()
                ids = sorted(range(experts), key=lambda e, by=biased: (-by[e], e))[: router.topk]
                shared_out = sum(scores[e] for e in ids) if router.renormalize else 1.0
                slots += [(place, e, scores[e] / shared_out * router.scaling_factor) for e in ids]
                mean_share = mean_share + scores / scores.sum() / len(real)
                total.z = total.z + router.z_loss * logits.exp().sum().log() ** 2
                for e in ids:
                    chose[e] += 1
            for e in range(experts):
                total.routed[e] += chose[e]
                if real:
                    share = chose[e] / (router.topk * len(real))
                    total.aux = total.aux + router.aux_loss * experts * share * mean_share[e]
            kept = self._kept(slots, length)
            for (place, e, weight), keeps in zip(slots, kept, strict=True):
                if not keeps:
                    total.dropped[e] += 1
                    continue
                result = weight * self._expert(f"experts.{e}", tokens[window, place])
                rows[window, place] = rows.get((window, place), torch.zeros_like(result)) + result
            for place in real if self.config.shared_ffn else ():
                result = self._expert("shared_expert", tokens[window, place])
                rows[window, place] = rows.get((window, place), torch.zeros_like(result)) + result
        if rows:
            where = torch.tensor(list(rows)).unbind(1)
            total.out = total.out.index_put(where, torch.stack(list(rows.values())))
        self.passes.append(total)
        return total

    def _expert(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.weights[f"{name}.gate_up"]
        return self.weights[f"{name}.down"] @ (F.silu(gate @ x) * (up @ x))

    def _kept(self, slots: list[tuple[int, int, Any]], length: int) -> list[bool]:
        factor, router = self.config.capacity_factor, self.config.router
        if factor is None:
            return [True] * len(slots)
        capacity = math.ceil(Fraction(str(factor)) * router.topk * length / router.num_experts)
        room = [capacity] * router.num_experts
        order = list(range(len(slots)))
        if self.config.drop_policy == "probability":
            order.sort(key=lambda at: -float(slots[at][2].detach()))
        kept = [False] * len(slots)
        for at in order:
            expert = slots[at][1]
            kept[at] = room[expert] > 0
            room[expert] -= 1
        return kept


def _drawn(name: str, shape: tuple[int, ...], init_dim: int) -> Tensor:
    whole = tuple(slice(0, size) for size in shape)
    value = initial_shard(
        name=name, global_shape=shape, slices=whole, init=Init.normal(STD), seed=SEED, init_dim=init_dim
    )
    return value.double().requires_grad_()
