"""The values that travel through a mixture-of-experts layer, and the protocols of its parts.

router → `Routing` → dispatcher.dispatch → `Dispatched` → experts → rows → dispatcher.combine → tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts each local token goes to, and with what weight.

    A slot is one (token, choice) pair. Slots of padding tokens and of dropped choices have `kept` false:
    they hold a valid expert id, but are sent nowhere, weigh nothing and are not counted.
    """

    topk_ids: Int[Tensor, "T K"]
    """Global expert id of each slot; distinct within a token; best first, ties to the lower id."""
    topk_probs: Float[Tensor, "T K"]
    """Combine weight of each slot, at least fp32, with gradient."""
    kept: Bool[Tensor, "T K"]
    num_experts: int

    @property
    def num_tokens(self) -> int:
        """T, the local tokens, padding included."""
        return self.topk_ids.shape[0]

    @property
    def topk(self) -> int:
        """K, the choices of one token."""
        return self.topk_ids.shape[1]

    def local_tokens_per_expert(self) -> Int[Tensor, "E"]:
        """Kept slots of this rank's tokens for each global expert, int64."""
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=self.topk_ids.device)
        return counts.scatter_add_(0, self.topk_ids.flatten(), self.kept.flatten().long())


@dataclass(frozen=True, kw_only=True)
class RouterStats:
    """Sums over this rank's real tokens; the trainer adds them up over micro-batches and ranks.

    Losses are sums, not means, and already multiplied by their coefficients; the trainer divides each by the
    step's count of the unit that it sums over (windows for `aux_loss`, tokens for `z_loss`).
    """

    aux_loss: Float[Tensor, ""]
    """Sum over windows of coefficient * balance loss of the window (0 for a window without real tokens)."""
    z_loss: Float[Tensor, ""]
    """Sum over real tokens of coefficient * logsumexp(logits)^2."""
    routed: Int[Tensor, "E"]
    """Slots that chose each expert before capacity, int64, no gradient."""
    dropped: Int[Tensor, "E"]
    """Slots of each expert that capacity dropped, int64, no gradient."""


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows that arrived at this rank's experts: expert-major, and within an expert in rank, then token order.

    `rows[:num_rows]` are real; a dispatcher may allocate more (their values are unspecified, and experts must
    neither read them into a result nor let them touch a gradient).
    """

    rows: Float[Tensor, "R H"]
    probs: Float[Tensor, "R"]
    """Combine weight of each row, at least fp32, with gradient."""
    tokens_per_expert: Int[Tensor, "E_local"]
    """Rows of each local expert, int64, on the device of `rows`; sums to `num_rows`."""
    num_rows: int
    host_counts: tuple[int, ...] | None = None
    """`tokens_per_expert` on the host, where the dispatcher knew it anyway."""
    handle: Any = None
    """What the same dispatcher's `combine` needs."""

    def counts_on_host(self) -> tuple[int, ...]:
        """`tokens_per_expert` as Python integers; copies (and waits) only if nobody has done so before."""
        if self.host_counts is not None:
            return self.host_counts
        return tuple(int(count) for count in self.tokens_per_expert.tolist())


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Rows as they arrived at the rank of their experts, before they are grouped by expert.

    A row may be for several local experts (nothing was sent twice) or for none. Within an expert, the order
    of the rows is the order of arrival: source rank, then token.
    """

    rows: Float[Tensor, "N H"]
    expert_ids: Int[Tensor, "N K"]
    """Local expert of each slot, int64, in range also where it is not kept; a row's kept are distinct."""
    kept: Bool[Tensor, "N K"]
    """Slots that exist at all."""
    probs: Float[Tensor, "N K"]
    """Combine weight of each slot, at least fp32, with gradient."""
    num_experts: int
    """E_local, the experts of this rank."""
    host_counts: tuple[int, ...] | None = None
    """Kept slots of each local expert on the host, where the dispatcher knew them anyway."""
    handle: Any = None
    """What the same dispatcher's `bring_back` needs."""


@runtime_checkable
class Dispatcher(Protocol):
    """Sends token rows to the ranks that own their experts, and brings the results back.

    Combine weights travel with the rows and are applied by the experts, so `combine` is a plain sum over the
    kept slots of each token.
    """

    def dispatch(self, tokens: Float[Tensor, "T H"], routing: Routing) -> Dispatched:
        """Send every kept slot's row to its expert. All ranks of the EP group call it together."""
        ...

    def combine(self, rows: Float[Tensor, "R H"], dispatched: Dispatched) -> Float[Tensor, "T H"]:
        """Return the experts' rows and add them up by token; zeros for a token without kept slots."""
        ...


@runtime_checkable
class ExpertFunction(Protocol):
    """The arithmetic of one backend: SwiGLU experts over grouped rows.

    `y = (silu(x @ gate.T) * (x @ up.T) * prob) @ down.T` for each row x of each expert.
    """

    def __call__(
        self,
        rows: Float[Tensor, "R H"],
        probs: Float[Tensor, "R"],
        gate_up: Float[Tensor, "E_local F2 H"],
        down: Float[Tensor, "E_local H F"],
        dispatched: Dispatched,
    ) -> Float[Tensor, "R H"]:
        """Run the experts on `rows`, which are grouped as `dispatched` says."""
        ...


@runtime_checkable
class ArrivalFunction(Protocol):
    """The arithmetic of a backend that groups the rows itself, fused with what comes before and after.

    For each arrived row, the sum over its kept slots of what `ExpertFunction` gives.
    """

    def __call__(
        self,
        arrival: Arrival,
        gate_up: Float[Tensor, "E_local F2 H"],
        down: Float[Tensor, "E_local H F"],
    ) -> Float[Tensor, "N H"]:
        """Run the experts on what arrived; the result is in the order of arrival."""
        ...


@dataclass(frozen=True, kw_only=True)
class MoEOutput:
    """What one mixture-of-experts layer returns."""

    tokens: Float[Tensor, "B S H"]
    stats: RouterStats
    routing: Routing
    """The routing that was used (to replay, verify or inspect)."""
    choices: Mapping[str, str] = field(default_factory=dict)
