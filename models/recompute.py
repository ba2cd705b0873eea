"""A layer whose backward computes it a second time, with the experts that its tokens chose the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from isozyme.moe.types import MoEOutput, RouterStats, Routing
from isozyme.parallel.recompute import recompute

Layer = Callable[[Tensor, Routing | None], tuple[Tensor, MoEOutput | None]]
"""`(x, routing to replay)` → hidden states, and what the experts' layer reports."""


def recomputed_layer(
    layer: Layer, x: Tensor, routing_override: Routing | None, parameters: Sequence[nn.Parameter]
) -> tuple[Tensor, MoEOutput | None]:
    """`layer(x, routing_override)`, of which backward keeps `x` and the routing alone.

    The second pass replays the first one's experts and drops, so that scores which differ by a rounding error
    cannot send a token elsewhere. Statistics are those of the first pass: nothing is counted twice. All ranks
    of the layer's groups call it together, in backward too.

    Args:
        layer: may bring along what is shared by all layers (rotation, documents).
        x: its input.
        routing_override: for the first pass.
        parameters: all that it uses.
    """
    found: list[_Report] = []

    def first(x: Tensor) -> tuple[Tensor, ...]:
        hidden, output = layer(x, routing_override)
        if output is None:
            return (hidden,)
        found.append(_Report.of(output))
        return hidden, *_tensors(output)

    def again(x: Tensor) -> tuple[Tensor, ...]:
        hidden, output = layer(x, found[0].routing if found else None)
        return (hidden,) if output is None else (hidden, *_tensors(output))

    hidden, *rest = recompute(first, (x,), parameters, again=again)
    return hidden, found[0].with_tensors(*rest) if found else None


def _tensors(output: MoEOutput) -> tuple[Tensor, ...]:
    """What of a report may have a gradient."""
    return output.tokens, output.stats.aux_loss, output.stats.z_loss, output.routing.topk_probs


@dataclass(frozen=True)
class _Report:
    """What of a report has none."""

    stats: RouterStats
    routing: Routing
    choices: dict[str, str]

    @staticmethod
    def of(output: MoEOutput) -> _Report:
        return _Report(output.stats, output.routing, dict(output.choices))

    def with_tensors(self, tokens: Tensor, aux_loss: Tensor, z_loss: Tensor, probs: Tensor) -> MoEOutput:
        return MoEOutput(
            tokens=tokens,
            stats=replace(self.stats, aux_loss=aux_loss, z_loss=z_loss),
            routing=replace(self.routing, topk_probs=probs),
            choices=self.choices,
        )
