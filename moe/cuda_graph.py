"""A mixture-of-experts layer in CUDA graphs: forward and backward replayed without the host.

Possible because nothing between router and combine waits for the host where one rank holds all experts and
the backend is `grouped_mm_fused` or `grouped_fp8`: the shapes do not depend on the routing, and where an
expert's rows begin stays on the device. So any later routing may be replayed, empty and overfull experts
included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from isozyme.core.errors import UsageError
from isozyme.moe.layer import MoELayer

GRAPHED_BACKENDS = ("grouped_mm_fused", "grouped_fp8")
"""Backends that never wait for the host; the others read the experts' row counts there."""

Graphed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""`(tokens [B, S, H], token_valid [B, S]) → (tokens, aux_loss, z_loss, routed)`."""


def graph_problems(layer: MoELayer) -> list[str]:
    """Why the layer cannot be captured in a CUDA graph, in words; empty if it can."""
    found = []
    device, topology = layer.router.weight.device, layer.groups.topology
    if device.type != "cuda":
        found.append(f"CUDA graphs need weights on CUDA, not on {device.type}")
    exchanging = topology.size("ep") * topology.size("etp")
    if exchanging > 1:
        found.append(
            f"dispatch reads on the host how many rows it receives: ep={topology.size('ep')}, "
            f"etp={topology.size('etp')}; only a rank with all experts knows its shapes beforehand"
        )
    windows = topology.size("tp") * topology.size("cp")
    if windows > 1:
        found.append(
            f"the balance loss sums counts over tp={topology.size('tp')} x cp={topology.size('cp')} ranks, "
            "and collectives in a graph are not supported"
        )
    if layer.experts.backend not in GRAPHED_BACKENDS:
        found.append(
            f"the backend reads row counts on the host: experts={layer.experts.backend}. "
            f"Use experts={' or '.join(GRAPHED_BACKENDS)}"
        )
    if layer.config.pad_to_capacity:
        found.append("the fixed-size exchange is not supported: pad_to_capacity=true")
    if any(hasattr(parameter, "main_grad") for parameter in layer.parameters()):
        found.append("gradients go to a gradient buffer, past autograd: capture the layer without one")
    return found


def graphed(
    layer: MoELayer, tokens: Float[Tensor, "B S H"], token_valid: Bool[Tensor, "B S"], *, warm_up: int = 3
) -> Graphed:
    """Capture the layer's forward and backward in two CUDA graphs.

    What is returned is called instead of the layer, with tensors of the same shapes, and takes part in
    autograd as usual. It gives `(tokens, aux_loss, z_loss, routed)`: results lie in memory that the next call
    overwrites, so use or copy them before. The layer's parameters may change in place, not be replaced.

    Args:
        layer: in training mode.
        tokens: a sample, which says the shapes; with `requires_grad` if later ones have it.
        token_valid: a sample.
        warm_up: eager runs before the capture, in which kernels are compiled.

    Raises:
        UsageError: if the layer cannot be captured; every reason is listed.
    """
    problems = graph_problems(layer)
    if problems:
        lines = "".join(f"\n  - {each}" for each in problems)
        raise UsageError(f"the layer cannot be captured in a CUDA graph:{lines}\nCall the layer itself.")
    sample = (tokens.detach().clone().requires_grad_(tokens.requires_grad), token_valid.clone())
    return cast(Graphed, torch.cuda.make_graphed_callables(_Plain(layer), sample, num_warmup_iters=warm_up))


class _Plain(nn.Module):
    """The layer with tensors instead of a `MoEOutput`."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, tokens: Float[Tensor, "B S H"], token_valid: Bool[Tensor, "B S"]
    ) -> tuple[Float[Tensor, "B S H"], Float[Tensor, ""], Float[Tensor, ""], Int[Tensor, "E"]]:
        output = self.layer(tokens, token_valid)
        stats = output.stats
        return output.tokens, stats.aux_loss, stats.z_loss, stats.routed
