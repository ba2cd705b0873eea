"""Wrong layers are refuted by the claim that they break; a plain right one on collectives passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from isozyme.moe.testing import LayerPromises, Place, Violation, check_moe_layer
from isozyme.parallel.collectives import gather_from_group, reduce_scatter_to_group

ONLY_DATA = LayerPromises(windows=2)


class Right:
    """Top-1 by the nearest column, linear experts; all tokens are gathered, results are reduce-scattered."""

    def __init__(self, place: Place) -> None:
        self.place, self.ep, self.edp = place, place.groups["ep"], place.groups["edp"]
        draw = torch.Generator().manual_seed(4)
        whole = torch.randn(
            place.num_experts, place.hidden, place.hidden, generator=draw, dtype=torch.float64
        )
        first = place.ep_rank * place.num_local_experts
        self.names = range(first, first + place.num_local_experts)
        self.experts = [whole[e].clone().requires_grad_() for e in self.names]
        self.gate = torch.randn(place.num_experts, place.hidden, generator=draw, dtype=torch.float64)
        self.gate.requires_grad_()

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        flat = torch.where(valid[..., None], tokens, 0.0).flatten(0, 1)
        logits = flat @ self.gate.T
        best = logits.softmax(-1).max(-1)
        sizes = self.ep.all_gather(torch.tensor([len(flat)])).tolist()
        rows = gather_from_group(flat, self.ep, sizes)
        weights = gather_from_group(best.values, self.ep, sizes)
        chosen = self.ep.all_gather(torch.where(valid.flatten(), best.indices, -1), sizes)
        out = torch.zeros_like(rows)
        for name, weight in zip(self.names, self.experts, strict=True):
            out = out + (rows @ weight) * (weights * (chosen == name))[:, None]
        return reduce_scatter_to_group(out, self.ep, sizes).view_as(tokens), None

    def gradients(self) -> Mapping[str, Tensor | None]:
        found = {f"expert.{name}": w.grad for name, w in zip(self.names, self.experts, strict=True)}
        found["gate"] = self.gate.grad
        return {name: self.reduced(name, grad) for name, grad in found.items()}

    def reduced(self, name: str, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        group = self.edp if name.startswith("expert") else self.place.groups.world
        return group.all_reduce(grad.clone())


class AveragedOverDataParallelRanks(Right):
    """Dense gradients are averaged, expert ones summed and so too large by EP (or the other way round)."""

    def reduced(self, name: str, grad: Tensor | None) -> Tensor | None:
        total = super().reduced(name, grad)
        return total if total is None or name == "gate" else total * self.ep.size


class DriftingReplicas(Right):
    """The gate's gradient stays on its rank."""

    def reduced(self, name: str, grad: Tensor | None) -> Tensor | None:
        return grad if name == "gate" else super().reduced(name, grad)


class NumbersExpertsFromZero(Right):
    """Every rank takes the first experts for its own (and names them so)."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        draw = torch.Generator().manual_seed(4)
        whole = torch.randn(
            place.num_experts, place.hidden, place.hidden, generator=draw, dtype=torch.float64
        )
        self.experts = [whole[e].clone().requires_grad_() for e in range(place.num_local_experts)]


class SkipsTheUnused(Right):
    """An expert without tokens gets no gradient."""

    def gradients(self) -> Mapping[str, Tensor | None]:
        return {
            name: grad if grad is None or grad.any() else None for name, grad in super().gradients().items()
        }


class ReadsPadding(Right):
    """A mean over all tokens, padding included, goes into the gate."""

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        out, _ = super().forward(tokens, valid)
        return out, (tokens.detach().sum() * self.gate).sum() * 1e-3


class LossPerRank(Right):
    """An auxiliary mean over the tokens of a rank: its strength depends on how many ranks there are."""

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        out, _ = super().forward(tokens, valid)
        real = torch.where(valid[..., None], tokens, 0.0).flatten(0, 1)
        return out, ((real @ self.gate.T).square().sum() / max(int(valid.sum()), 1))


class LosesARank(Right):
    """Rows come back one rank further, where ranks hold equally many."""

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        out, extra = super().forward(tokens, valid)
        sizes = self.ep.all_gather(torch.tensor([out.shape[0]])).tolist()
        if len(set(sizes)) == 1 and self.ep.size > 1:
            everyone = gather_from_group(out.contiguous(), self.ep, sizes).split(sizes)
            out = everyone[(self.ep.rank + 1) % self.ep.size]
        return out, extra


def dense(layer: Any, tokens: Tensor, valid: Tensor) -> Tensor:
    """On one rank there is nobody to talk to."""
    flat = torch.where(valid[..., None], tokens, 0.0)
    best = (flat @ layer.gate.T).softmax(-1).max(-1)
    out = torch.zeros_like(flat)
    for name, weight in zip(layer.names, layer.experts, strict=True):
        out += (flat @ weight) * (best.values * (best.indices == name) * valid)[..., None]
    return out.detach()


class TwiceAsMuch(Right):
    """Wrong everywhere alike, so only a reference finds it."""

    def forward(self, tokens: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        out, extra = super().forward(tokens, valid)
        return out * 2, extra


def test_a_right_layer_passes() -> None:
    assert check_moe_layer(Right, promises=ONLY_DATA, reference=dense, examples=15).worlds == 15


@pytest.mark.parametrize(
    ("fault", "claims"),
    [
        (AveragedOverDataParallelRanks, {"the_layout_does_not_matter"}),
        (DriftingReplicas, {"replicas_agree", "the_layout_does_not_matter"}),
        (NumbersExpertsFromZero, {"the_layout_does_not_matter"}),
        (SkipsTheUnused, {"every_parameter_gets_a_gradient"}),
        (ReadsPadding, {"padding_touches_nothing"}),
        (LossPerRank, {"the_layout_does_not_matter"}),
        (LosesARank, {"the_layout_does_not_matter", "ranks_make_the_same_calls"}),
    ],
)
def test_a_fault_is_found_by_the_claim_that_it_breaks_and_replays(fault: Any, claims: set[str]) -> None:
    with pytest.raises(Violation) as caught:
        check_moe_layer(fault, promises=ONLY_DATA, seconds=0.5)
    assert caught.value.invariant in claims
    with pytest.raises(Violation, match=caught.value.invariant):
        check_moe_layer(fault, replay=caught.value.replay)


def test_what_is_wrong_on_one_rank_too_needs_a_reference() -> None:
    check_moe_layer(TwiceAsMuch, promises=ONLY_DATA, examples=4)
    with pytest.raises(Violation, match="outputs_equal_the_dense_loop"):
        check_moe_layer(TwiceAsMuch, promises=ONLY_DATA, reference=dense, seconds=0.5)


def test_too_large_a_gradient_is_said_to_be_so_many_times_too_large() -> None:
    with pytest.raises(Violation, match="2 times as much"):
        check_moe_layer(
            AveragedOverDataParallelRanks, replay="dp=2 ep=2 experts=2 topk=1 kinds=0.1.2.3|1.2.3.0"
        )
