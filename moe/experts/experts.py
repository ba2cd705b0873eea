"""The experts of one rank: their weights and the backend that computes with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.config import Precision
from isozyme.core.errors import UsageError
from isozyme.moe.experts.delayed import DelayedGradients, delay_point
from isozyme.moe.experts.registry import ExpertSetting, choose_backend
from isozyme.moe.experts.storage import ExpertWeights
from isozyme.moe.grouping import group_rows, ungroup_rows
from isozyme.moe.types import Arrival, ArrivalFunction, Dispatched, ExpertFunction
from isozyme.parallel.process_groups import ProcessGroups

_ON_META = "not chosen yet: the weights are on the meta device"


def _nothing_runs(*_: object) -> Tensor:
    raise UsageError(f"experts cannot run: backend {_ON_META}. Move them to a device first.")


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The weights as one pass of the experts uses them."""

    gate_up: Float[Tensor, "E_local F2 H"]
    down: Float[Tensor, "E_local H F"]
    delayed: DelayedGradients | None = None
    """Where the backend leaves the weights' gradients; None if it returns them."""

    @property
    def options(self) -> dict[str, Any]:
        """What the backend's function takes besides the stacks."""
        return {} if self.delayed is None else {"delayed": self.delayed}


class Experts(nn.Module):
    """Runs this rank's SwiGLU experts on dispatched rows.

    The weights are those of `ExpertWeights`, in its canonical shapes, whatever the backend. The backend is
    chosen once, for the device and dtype given here, and again if the weights are moved or cast. On the meta
    device nothing can run, and the choice waits until they are moved from there (`to_empty`).

    Args:
        backend: name of a backend of `isozyme.moe.experts.registry`, or `auto`.
        precision: precision of the GEMMs; that of `dtype` if None.
        recompute: make the activation a second time in backward, if the backend would keep it.
        delay_wgrad: compute the weights' gradients where backward comes past the call of `stacks`.
        cache_quantized: keep quantised weights over the micro-batches of a step.

    The other arguments are those of `ExpertWeights`.

    Attributes:
        backend: the name of the one that runs; None on the meta device.
        choice: the same in words, with the reason.

    Raises:
        BackendError: if the backend cannot run here; the message lists every unmet condition.
        ConfigError: if the layout does not divide the experts.
    """

    def __init__(
        self,
        *,
        name: str,
        num_experts: int,
        hidden: int,
        ffn: int,
        groups: ProcessGroups,
        seed: int | None,
        init_std: float,
        output_std: float,
        backend: str = "auto",
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
        delay_wgrad: bool = False,
        cache_quantized: bool = False,
    ) -> None:
        super().__init__()
        weights = ExpertWeights(
            name=name,
            num_experts=num_experts,
            hidden=hidden,
            ffn=ffn,
            groups=groups,
            seed=seed,
            init_std=init_std,
            output_std=output_std,
            device=device,
            dtype=dtype,
        )
        self._take(
            weights,
            backend=backend,
            precision=precision,
            recompute=recompute,
            delay_wgrad=delay_wgrad,
            cache_quantized=cache_quantized,
        )

    @classmethod
    def over(
        cls, weights: ExpertWeights, *, backend: str = "auto", precision: Precision | None = None
    ) -> Experts:
        """Experts that compute with weights that exist already; other settings as by default."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._take(weights, backend=backend, precision=precision)
        return made

    def _take(
        self,
        weights: ExpertWeights,
        *,
        backend: str,
        precision: Precision | None,
        recompute: bool = False,
        delay_wgrad: bool = False,
        cache_quantized: bool = False,
    ) -> None:
        self.weights = weights
        self._asked, self._precision, self._recompute = backend, precision, recompute
        self._delay_wgrad, self._cache_quantized = delay_wgrad, cache_quantized
        self.backend: str | None
        self._function: ExpertFunction | ArrivalFunction = cast(ExpertFunction, _nothing_runs)
        self._choose()

    def _choose(self) -> None:
        down = self.weights.down[0]
        if down.is_meta:
            self.choice, self.backend, self.groups_rows = _ON_META, None, False
            return
        setting = ExpertSetting(
            device=down.device,
            dtype=down.dtype,
            num_local_experts=len(self.weights.down),
            hidden=down.shape[0],
            ffn=down.shape[1],
            precision=self._precision,
            recompute=self._recompute,
            delay_wgrad=self._delay_wgrad,
            cache_quantized=self._cache_quantized,
        )
        backend, self.choice = choose_backend(self._asked, setting)
        self.backend = backend.name
        self._function = backend.build(setting, self.weights)
        self.groups_rows = backend.groups_rows

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._choose()
        return self

    def stacks(self) -> Stacks:
        """The weights for one pass.

        With `delay_wgrad` their gradients are computed where backward comes past this call: make it after an
        exchange of rows has started and before it is finished, and backward will do so while the exchange of
        the rows' gradients is under way.
        """
        gate_up, down = self.weights.stacks()
        if not (self._delay_wgrad and torch.is_grad_enabled()):
            return Stacks(gate_up=gate_up, down=down)
        gate_up, down, delayed = delay_point(gate_up, down)
        return Stacks(gate_up=gate_up, down=down, delayed=delayed)

    def forward(self, dispatched: Dispatched, stacks: Stacks | None = None) -> Float[Tensor, "R H"]:
        """The experts' results for `dispatched.rows`, already multiplied by the rows' combine weights.

        Args:
            dispatched: the rows, grouped by expert.
            stacks: the weights for this pass; by default `stacks()`.

        Raises:
            UsageError: if the backend groups the rows itself: then call `on_arrival`.
        """
        if self.groups_rows:
            raise UsageError(f"{self.choice}: this backend takes rows as they arrived. Call on_arrival.")
        given = self.stacks() if stacks is None else stacks
        function = cast(Callable[..., Tensor], self._function)
        return function(
            dispatched.rows, dispatched.probs, given.gate_up, given.down, dispatched, **given.options
        )

    def on_arrival(self, arrival: Arrival, stacks: Stacks | None = None) -> Float[Tensor, "N H"]:
        """For each arrived row the weighted sum over its local experts, in the order of arrival.

        Args:
            arrival: what arrived.
            stacks: the weights for this pass; by default `stacks()`.
        """
        given = self.stacks() if stacks is None else stacks
        if not self.groups_rows:
            dispatched = group_rows(arrival)
            return ungroup_rows(self(dispatched, given), dispatched)
        function = cast(Callable[..., Tensor], self._function)
        return function(arrival, given.gate_up, given.down, **given.options)
