"""The experts of one rank: their weights and the backend that computes with them."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from isozyme.core.config import Precision
from isozyme.core.errors import UsageError
from isozyme.moe.experts.registry import ExpertSetting, choose_backend
from isozyme.moe.experts.storage import ExpertWeights
from isozyme.moe.grouping import group_rows, ungroup_rows
from isozyme.moe.types import Arrival, ArrivalFunction, Dispatched, ExpertFunction
from isozyme.parallel.process_groups import ProcessGroups

_ON_META = "not chosen yet: the weights are on the meta device"


def _nothing_runs(*_: object) -> Tensor:
    raise UsageError(f"experts cannot run: backend {_ON_META}. Move them to a device first.")


class Experts(nn.Module):
    """Runs this rank's SwiGLU experts on dispatched rows.

    The weights are those of `ExpertWeights`, in its canonical shapes, whatever the backend. The backend is
    chosen once, for the device and dtype given here, and again if the weights are moved or cast. On the meta
    device nothing can run, and the choice waits until they are moved from there (`to_empty`).

    Args:
        backend: name of a backend of `isozyme.moe.experts.registry`, or `auto`.
        precision: precision of the GEMMs; that of `dtype` if None.
        recompute: make the activation a second time in backward, if the backend would keep it.

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
        seed: int,
        init_std: float,
        output_std: float,
        backend: str = "auto",
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.weights = ExpertWeights(
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
        self._asked, self._precision, self._recompute = backend, precision, recompute
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
        )
        backend, self.choice = choose_backend(self._asked, setting)
        self.backend = backend.name
        self._function = backend.build(setting, self.weights)
        self.groups_rows = backend.groups_rows

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._choose()
        return self

    def forward(self, dispatched: Dispatched) -> Float[Tensor, "R H"]:
        """The experts' results for `dispatched.rows`, already multiplied by the rows' combine weights.

        Raises:
            UsageError: if the backend groups the rows itself: then call `on_arrival`.
        """
        if self.groups_rows:
            raise UsageError(f"{self.choice}: this backend takes rows as they arrived. Call on_arrival.")
        gate_up, down = self.weights.stacks()
        function = cast(ExpertFunction, self._function)
        return function(dispatched.rows, dispatched.probs, gate_up, down, dispatched)

    def on_arrival(self, arrival: Arrival) -> Float[Tensor, "N H"]:
        """For each arrived row the weighted sum over its local experts, in the order of arrival."""
        if not self.groups_rows:
            dispatched = group_rows(arrival)
            return ungroup_rows(self(dispatched), dispatched)
        gate_up, down = self.weights.stacks()
        return cast(ArrivalFunction, self._function)(arrival, gate_up, down)
