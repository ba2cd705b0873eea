"""The arithmetic of AdamW: Transformer Engine's, apex's or torch's kernel behind one small interface.

All of them update the same tensors in place: masters, and moments that the optimiser owns. So moments can be
saved and loaded without asking which kernel was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isozyme.core.accelerators import Choice, Probe, apex_fused_adam, te_fused_adam
from isozyme.core.config import OptimConfig
from isozyme.core.errors import BackendError


@dataclass(frozen=True, eq=False, kw_only=True)
class Slot:
    """The tensors of one parameter that an update reads and writes; all of one shape and dtype."""

    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    decay: bool


class AdamW:
    """One of the implementations, bound to its tensors.

    Args:
        build: makes a `torch.optim.Optimizer` from parameter groups.
        slots: what is updated.
        config: learning rate (overwritten at each step), betas, eps, weight decay.
        step_in_group: whether steps are counted by group (a number) and not by parameter (a tensor).
    """

    def __init__(
        self,
        build: Callable[..., Any],
        slots: Sequence[Slot],
        config: OptimConfig,
        *,
        step_in_group: bool,
    ) -> None:
        self._step_in_group = step_in_group
        sets = [
            ([slot for slot in slots if slot.decay], config.weight_decay),
            ([slot for slot in slots if not slot.decay], 0.0),
        ]
        groups = [
            {"params": [slot.master for slot in chosen], "weight_decay": weight}
            for chosen, weight in sets
            if chosen
        ]
        self._inner = build(groups, lr=config.lr, betas=config.betas, eps=config.eps) if groups else None
        for slot in slots:
            slot.master.grad = slot.grad
            state = {"exp_avg": slot.exp_avg, "exp_avg_sq": slot.exp_avg_sq}
            if not step_in_group:
                state["step"] = torch.zeros((), dtype=torch.float32, device=slot.master.device)
            assert self._inner is not None
            self._inner.state[slot.master] = state

    def set_updates(self, count: int) -> None:
        """Go on as after `count` updates (for the bias correction)."""
        if self._inner is None:
            return
        if self._step_in_group:
            for group in self._inner.param_groups:
                group["step"] = count
            return
        for state in self._inner.state.values():
            state["step"].fill_(count)

    def step(self, lr: float) -> None:
        """Update every master and its moments once."""
        if self._inner is None:
            return
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()


def _torch(slots: Sequence[Slot], config: OptimConfig) -> tuple[AdamW, str]:
    fused = all(slot.master.device.type in ("cpu", "cuda") for slot in slots)

    def build(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **settings, fused=fused)

    return AdamW(build, slots, config, step_in_group=False), f"torch.optim.AdamW(fused={fused})"


def _fused(probe: Probe, slots: Sequence[Slot]) -> str | None:
    """Why a FusedAdam that was looked for cannot update these tensors."""
    if probe.why_not is not None:
        return probe.why_not
    for slot in slots:
        if slot.master.dtype != torch.float32 or slot.master.device.type != "cuda":
            return (
                "its kernel updates float32 masters on CUDA only, and there is one of "
                f"{str(slot.master.dtype).removeprefix('torch.')} on {slot.master.device.type}"
            )
    return None


def choose(
    slots: Sequence[Slot], config: OptimConfig, probes: dict[str, Callable[[], Probe]] | None = None
) -> tuple[AdamW, Choice]:
    """The implementation that `config.implementation` names; for `auto` the first usable of te, apex, torch.

    Args:
        slots: what is to be updated.
        config: the optimiser's settings.
        probes: how to look for `te` and `apex`; by default those of `isozyme.core.accelerators`.

    Raises:
        BackendError: if the one that was named cannot be used; the message says why.
    """
    wanted = config.implementation
    found = {"te": te_fused_adam, "apex": apex_fused_adam} if probes is None else probes
    candidates = list(found) if wanted == "auto" else [name for name in found if name == wanted]
    reasons: list[str] = []
    for name in candidates:
        probe = found[name]()
        reason = _fused(probe, slots)
        if reason is None:
            assert probe.part is not None
            why = "; ".join(["named by optim.implementation" if wanted != "auto" else "preferred", *reasons])
            return AdamW(probe.part, slots, config, step_in_group=True), Choice(name, why)
        reasons.append(f"not {name}: {reason}")
    if wanted in found:
        raise BackendError(
            f"the optimiser implementation that was named cannot run: optim.implementation={wanted}; "
            f"{'; '.join(reasons)}. Use optim.implementation=auto or torch."
        )
    backend, what = _torch(slots, config)
    why = what if wanted == "torch" else "; ".join([what, *reasons])
    return backend, Choice("torch", why)
