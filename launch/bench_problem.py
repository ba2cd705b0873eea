"""One layer to compute: inputs, routing, weights and the gradient of the result, the same for everybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isozyme.core.config import Precision
from isozyme.launch.bench_routing import choose_ids, choose_probs
from isozyme.launch.bench_shapes import Shape
from isozyme.moe.experts.storage import ExpertWeights

Outcome = Mapping[str, Sequence[Tensor]]
"""What an implementation computed, by name: `out`, `d_tokens`, `d_probs` (or `d_router`), and one tensor an
expert for `d_gate_up` ([2F, H] or [2, F, H], gate first) and `d_down` ([H, F])."""


class RandomExpertWeights(ExpertWeights):
    """Expert weights in the package's own storage, drawn on the device (their values need no name).

    Args:
        shape: sizes.
        device: where they are.
        dtype: their type.
        seed: of the draw.
    """

    def __init__(self, shape: Shape, *, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        nn.Module.__init__(self)
        draw = torch.Generator(device).manual_seed(seed)
        experts, hidden, ffn = shape.num_experts, shape.hidden, shape.ffn
        gate_up = torch.empty(experts, 2, ffn, hidden, device=device, dtype=dtype)
        down = torch.empty(experts, hidden, ffn, device=device, dtype=dtype)
        gate_up.normal_(0, hidden**-0.5, generator=draw)
        down.normal_(0, ffn**-0.5, generator=draw)
        self.expert_ids = tuple(range(experts))
        self.gate_up = nn.ParameterList([nn.Parameter(view) for view in gate_up.unbind(0)])
        self.down = nn.ParameterList([nn.Parameter(view) for view in down.unbind(0)])

    def stacked_leaves(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The same memory as two parameters `[E, 2F, H]` and `[E, H, F]`, as others store their weights."""
        gate_up, down = self.stacks()
        return nn.Parameter(gate_up.detach()), nn.Parameter(down.detach())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One layer, forward and backward."""

    shape: Shape
    routing: str
    tokens: Tensor
    """[T, H], a leaf with gradient."""
    topk_ids: Tensor
    """[T, K] int64."""
    topk_probs: Tensor
    """[T, K], at least fp32, a leaf with gradient."""
    upstream: Tensor
    """[T, H], gradient of the result."""
    weights: RandomExpertWeights
    router: Tensor
    """[E, H], a leaf with gradient, for what includes a router."""
    logit_offset: Tensor
    """[T, E], at least fp32: added to the logits, it makes a router choose `topk_ids`."""

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of tokens and weights."""
        return self.tokens.dtype

    @property
    def tokens_per_expert(self) -> Tensor:
        """[E] int64."""
        return torch.bincount(self.topk_ids.flatten(), minlength=self.shape.num_experts)

    @staticmethod
    def draw(
        shape: Shape,
        routing: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        seed: int = 0,
        weights: RandomExpertWeights | None = None,
    ) -> Problem:
        """Random tokens, weights and gradients of about unit size, and the routing.

        Args:
            shape: sizes.
            routing: see `isozyme.launch.bench_routing`.
            device: where.
            dtype: of tokens and weights.
            seed: of every draw.
            weights: to use again those of another problem of the same shape.
        """
        wide = torch.promote_types(dtype, torch.float32)
        ids = choose_ids(
            routing, tokens=shape.tokens, num_experts=shape.num_experts, topk=shape.topk, seed=seed
        )
        draw = torch.Generator(device).manual_seed(seed + 1)

        def normal(*sizes: int, std: float = 1.0) -> Tensor:
            return torch.empty(*sizes, device=device, dtype=dtype).normal_(0, std, generator=draw)

        offset = torch.zeros(shape.tokens, shape.num_experts, dtype=wide).scatter_(1, ids, 32.0)
        if weights is None:
            weights = RandomExpertWeights(shape, device=device, dtype=dtype, seed=seed)
        return Problem(
            shape=shape,
            routing=routing,
            tokens=normal(shape.tokens, shape.hidden).requires_grad_(),
            topk_ids=ids.to(device),
            topk_probs=choose_probs(shape.tokens, shape.topk, seed + 2).to(device, wide).requires_grad_(),
            upstream=normal(shape.tokens, shape.hidden),
            weights=weights,
            router=normal(shape.num_experts, shape.hidden, std=shape.hidden**-0.5).requires_grad_(),
            logit_offset=offset.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class Built:
    """An implementation bound to a problem."""

    forward: Callable[[], Tensor]
    """Computes `[T, H]` with a graph."""
    inputs: Mapping[str, Tensor]
    """The leaves that are no expert weights, by the name of their gradient."""
    weights: Sequence[Tensor]
    """The expert weights as leaves, however they are stored."""
    weight_gradients: Callable[[Sequence[Tensor]], Mapping[str, Sequence[Tensor]]]
    """Their gradients in the canonical form of an `Outcome`."""

    def backward(self, out: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        """Gradients of inputs and weights, returned and not accumulated, by all implementations alike."""
        return torch.autograd.grad(out, [*self.inputs.values(), *self.weights], upstream)

    def step(self, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Forward and backward."""
        out = self.forward()
        return out, self.backward(out, upstream)

    def outcome(self, out: Tensor, grads: Sequence[Tensor]) -> Outcome:
        """Name what `step` returned."""
        count = len(self.inputs)
        named = {name: [grad] for name, grad in zip(self.inputs, grads[:count], strict=True)}
        return {"out": [out], **named, **self.weight_gradients(grads[count:])}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An implementation that takes part."""

    name: str
    kind: str
    """`isozyme`, `peer` or `rung`."""
    precision: Precision
    build: Callable[[Problem], Built]
    """Raises `BackendError` where it cannot run."""
    includes_router: bool = False


def parameters_by_expert(grads: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """`weight_gradients` of one parameter an expert: all gate-up, then all down."""
    half = len(grads) // 2
    return {"d_gate_up": list(grads[:half]), "d_down": list(grads[half:])}


def two_stacks(grads: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """`weight_gradients` of two stacked parameters `[E, 2F, H]` and `[E, H, F]`."""
    gate_up, down = grads
    return {"d_gate_up": list(gate_up.unbind(0)), "d_down": list(down.unbind(0))}


def three_stacks(grads: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """`weight_gradients` of stacked gate, up (each `[E, F, H]`) and down."""
    gate, up, down = grads
    return {"d_gate_up": [torch.stack(pair) for pair in zip(gate, up, strict=True)], "d_down": list(down)}
