"""Recording which experts each token chose, and replaying a recorded choice.

Two scores that are equal to rounding may be ranked differently at another layout, which changes everything
after them. Such a flip is replayed and reported; `isozyme.launch.verify_flips` finds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from isozyme.core.batch import Batch
from isozyme.core.context import ContextOrder
from isozyme.models.types import ModelOutput
from isozyme.moe.types import Routing
from isozyme.parallel.context_layout import ContextLayout
from isozyme.parallel.overlap import Unit
from isozyme.parallel.process_groups import ProcessGroups

Key = tuple[int, int]
"""(index of the window, number of the expert layer in the whole model)."""


@dataclass(frozen=True, kw_only=True)
class WindowRouting:
    """The routing of a window, or of one rank's share of it."""

    places: Int[Tensor, "S"]
    """Where in the window each of these tokens stands."""
    topk_ids: Int[Tensor, "S K"]
    topk_probs: Float[Tensor, "S K"]
    kept: Bool[Tensor, "S K"]
    num_experts: int


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A token that chose (or an expert that dropped) otherwise than the reference did."""

    window: int
    position: int
    """Place of the token in its window; -1 where a drop concerns a whole expert."""
    layer: int
    gap: float
    """How far apart the scores are that would have to be tied; infinite if that is not known."""
    dropped: bool = False

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """What it is about; the gap aside."""
        return self.window, self.position, self.layer, self.dropped

    def __str__(self) -> str:
        what = "the dropped slots differ" if self.dropped else "the chosen experts differ"
        token = "" if self.position < 0 else f", token {self.position}"
        return f"{what}: window {self.window}{token}, expert layer {self.layer}, score gap {self.gap:.2e}"


class Recorder(nn.Module):
    """A model that notes the routing of every call and, given one, replays it.

    While it replays, it asks every module that has a method `routing_flips(tokens, token_valid, override)`,
    such as `isozyme.moe.router.Router`, which tokens would have chosen otherwise and by what gap.

    Args:
        model: follows `isozyme.models.types.Model`.
        groups: this rank's groups.
        layers: numbers, in the whole model, of the expert layers that it holds; None if it holds all.
        replay: whole windows' routings to use instead of its own.
        order: which tokens of a window a context-parallel rank holds.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ProcessGroups,
        *,
        layers: range | None = None,
        replay: Mapping[Key, WindowRouting] | None = None,
        order: ContextOrder = "zigzag",
    ) -> None:
        super().__init__()
        self.model, self._groups, self._replay, self._order = model, groups, replay, order
        self._first_layer = 0 if layers is None else layers.start
        held = sorted({layer for _, layer in replay}) if replay is not None else []
        self._layers = held if layers is None else list(layers)
        self._plan: list[Sequence[int]] = []
        self._active: _Call | None = None
        self.routings: dict[Key, WindowRouting] = {}
        self.flips: list[Flip] = []
        self.observed = False
        """Whether some router could say what it would have chosen."""
        if replay is not None:
            for module in model.modules():
                if callable(getattr(module, "routing_flips", None)):
                    module.register_forward_pre_hook(self._observe, with_kwargs=True)
                    self.observed = True

    @property
    def backward_units(self) -> tuple[Unit, ...] | None:
        """Those of the model, if it has any."""
        return getattr(self.model, "backward_units", None)

    def begin(self, windows: Sequence[Sequence[int]]) -> None:
        """Say which windows the coming calls hold, call by call."""
        self._plan = list(windows)

    def forward(
        self, batch: Batch, hidden: Tensor | None = None, routing_override: Sequence[Routing] | None = None
    ) -> ModelOutput:
        """Run the model on the next planned windows."""
        windows = self._plan.pop(0)
        tokens = batch.tokens.numel()
        if routing_override is None and self._replay is not None and self._layers:
            routing_override = [self._whole(windows, layer, tokens) for layer in self._layers]
        self._active = _Call(windows=windows)
        try:
            output: ModelOutput = self.model(batch, hidden=hidden, routing_override=routing_override)
        finally:
            self._active = None
        for offset, routing in enumerate(output.routings):
            self._note(windows, self._first_layer + offset, routing)
        return output

    def _whole(self, windows: Sequence[int], layer: int, num_tokens: int) -> Routing:
        """The recorded routing of this rank's part of some windows."""
        assert self._replay is not None
        found = [self._replay[window, layer] for window in windows]
        whole = found[0].topk_ids.shape[0]
        length = min(num_tokens // len(windows), whole // self._groups.topology.size(("tp", "cp")))
        share = self._places(length)
        return Routing(
            topk_ids=torch.cat([routing.topk_ids[share] for routing in found]),
            topk_probs=torch.cat([routing.topk_probs[share] for routing in found]),
            kept=torch.cat([routing.kept[share] for routing in found]),
            num_experts=found[0].num_experts,
        )

    def _places(self, share: int) -> Int[Tensor, "S"]:
        """The places of this rank's tokens of a window: TP cuts the tokens of a CP rank into equal runs."""
        at, topology = self._groups.coordinates, self._groups.topology
        tp, cp = topology.size("tp"), topology.size("cp")
        layout = ContextLayout(window=share * tp * cp, size=cp, order=self._order)
        return layout.places(at["cp"])[at["tp"] * share : (at["tp"] + 1) * share]

    def _note(self, windows: Sequence[int], layer: int, routing: Routing) -> None:
        share = routing.num_tokens // len(windows)
        for number, window in enumerate(windows):
            rows = slice(number * share, (number + 1) * share)
            self.routings[window, layer] = WindowRouting(
                places=self._places(share),
                topk_ids=routing.topk_ids[rows].clone(),
                topk_probs=routing.topk_probs[rows].detach().clone(),
                kept=routing.kept[rows].clone(),
                num_experts=routing.num_experts,
            )

    def _observe(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a router replays: what would it have chosen? (Not in a recomputation during backward.)"""
        if self._active is None:
            return
        given = inspect.signature(router.forward).bind(*args, **kwargs).arguments
        layer = self._first_layer + self._active.layer
        self._active.layer += 1
        override = given.get("routing_override")
        if override is None:
            return
        ask: Callable[..., Any] = router.routing_flips  # type: ignore[assignment]
        found = ask(given["tokens"], given["token_valid"], override)
        share = override.num_tokens // len(self._active.windows)
        places = self._places(share).tolist()
        for token, gap in zip(found.tokens.tolist(), found.gaps.tolist(), strict=True):
            number, position = divmod(token, share)
            window = self._active.windows[number]
            self.flips.append(Flip(window=window, position=places[position], layer=layer, gap=gap))


@dataclass
class _Call:
    windows: Sequence[int]
    layer: int = 0


def load_by_layer(routings: Mapping[Key, WindowRouting]) -> dict[int, list[int]]:
    """Kept slots of each expert, layer by layer."""
    counts: dict[int, Tensor] = {}
    for (_, layer), routing in routings.items():
        flat = rearrange(routing.topk_ids, "s k -> (s k)")[rearrange(routing.kept, "s k -> (s k)")]
        found = torch.bincount(flat.cpu(), minlength=routing.num_experts)
        counts[layer] = counts.get(layer, torch.zeros_like(found)) + found
    return {layer: count.tolist() for layer, count in sorted(counts.items())}
