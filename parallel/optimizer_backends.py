"""The arithmetic of AdamW: our, Transformer Engine's, apex's or torch's kernel behind one interface.

All of them update the same tensors in place: masters, and moments that the optimiser owns. So moments can be
saved and loaded without asking which kernel was used. Ours and Transformer Engine's also round masters into
parameters of lower precision in the same pass, which saves reading them again; ours clips in it as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isozyme.core.accelerators import Choice, Probe, apex_fused_adam, te_fused_adam
from isozyme.core.config import OptimConfig
from isozyme.core.errors import BackendError
from isozyme.parallel.optimizer_one_pass import OnePassAdamW, one_pass_problem


@dataclass(frozen=True, eq=False, kw_only=True)
class Slot:
    """The tensors of one parameter that an update reads and writes, of one shape; see there for dtypes."""

    master: Tensor
    grad: Tensor
    """In the dtype of the master, or of lower precision; the moments are always in the master's."""
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None = None
    """The parameter itself, where it is the master rounded to lower precision."""
    decay: bool


class AdamW:
    """One of the implementations, bound to its tensors.

    Args:
        build: makes a `torch.optim.Optimizer` from parameter groups.
        slots: what is updated.
        config: learning rate (overwritten at each step), betas, eps, weight decay.
        step_in_group: whether steps are counted by group (a number) and not by parameter (a tensor).
        writes_copies: whether the implementation takes the copies as its parameters, and has masters in its
            state and gradients beside it, as Transformer Engine's can.

    Attributes:
        writes_copies: whether `step` leaves every copy equal to its rounded master.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        slots: Sequence[Slot],
        config: OptimConfig,
        *,
        step_in_group: bool,
        writes_copies: bool = False,
    ) -> None:
        self._step_in_group, self.writes_copies = step_in_group, writes_copies
        sets = [
            ([slot for slot in slots if slot.decay], config.weight_decay),
            ([slot for slot in slots if not slot.decay], 0.0),
        ]
        groups = [
            {"params": [self._parameter(slot) for slot in chosen], "weight_decay": weight}
            for chosen, weight in sets
            if chosen
        ]
        self._inner = build(groups, lr=config.lr, betas=config.betas, eps=config.eps) if groups else None
        own = [slot for slot in slots if slot.grad.dtype == slot.master.dtype]
        self._grads = [slot.grad for slot in own]
        self._narrow = [slot for slot in slots if slot.grad.dtype != slot.master.dtype]
        """Those whose gradients are widened for the time of a step: kernels want one dtype."""
        for slot in own:
            self._give(slot, slot.grad)
        for slot in slots:
            parameter = self._parameter(slot)
            state = {"exp_avg": slot.exp_avg, "exp_avg_sq": slot.exp_avg_sq}
            if writes_copies and parameter is slot.copy:
                state["master_param"] = slot.master
            if not step_in_group:
                state["step"] = torch.zeros((), dtype=torch.float32, device=slot.master.device)
            assert self._inner is not None
            self._inner.state[parameter] = state

    def _parameter(self, slot: Slot) -> Tensor:
        """What the implementation sees as the parameter."""
        return slot.copy if self.writes_copies and slot.copy is not None else slot.master

    def _give(self, slot: Slot, grad: Tensor | None) -> None:
        """Put a gradient where the implementation looks for it."""
        parameter = self._parameter(slot)
        if self.writes_copies:
            parameter.decoupled_grad = grad  # type: ignore[attr-defined]
        else:
            parameter.grad = grad

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

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update every master and its moments once, from the gradients times `scale`.

        They are scaled in place, those of lower precision in a copy of the masters' precision.
        """
        if self._inner is None:
            return
        widened = [slot.grad.to(slot.master.dtype) for slot in self._narrow]
        for slot, grad in zip(self._narrow, widened, strict=True):
            self._give(slot, grad)
        if scale != 1.0:
            torch._foreach_mul_([*self._grads, *widened], scale)
        for group in self._inner.param_groups:
            group["lr"] = lr
        self._inner.step()
        for slot in self._narrow:
            self._give(slot, None)


def _torch(slots: Sequence[Slot], config: OptimConfig) -> tuple[AdamW, str]:
    fused = all(slot.master.device.type in ("cpu", "cuda") for slot in slots)
    build = partial(torch.optim.AdamW, fused=fused)
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


def _bind(probe: Probe, slots: Sequence[Slot], config: OptimConfig) -> tuple[AdamW, str]:
    """A FusedAdam that was found, and what it does; it writes parameters itself if it can."""
    assert probe.part is not None
    kinds = {slot.copy.dtype for slot in slots if slot.copy is not None}
    known = set(inspect.signature(probe.part).parameters)
    if len(kinds) != 1 or not {"master_weights", "use_decoupled_grad"} <= known:
        return AdamW(probe.part, slots, config, step_in_group=True), "updates masters"
    build = partial(probe.part, master_weights=True, use_decoupled_grad=True)
    backend = AdamW(build, slots, config, step_in_group=True, writes_copies=True)
    return backend, f"updates masters and writes {str(kinds.pop()).removeprefix('torch.')} parameters"


def choose(
    slots: Sequence[Slot], config: OptimConfig, probes: dict[str, Callable[[], Probe]] | None = None
) -> tuple[AdamW | OnePassAdamW, Choice]:
    """The implementation that `config.implementation` names.

    For `auto` the first usable of triton (one pass, ours), te, apex and torch.

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
    if wanted in ("auto", "triton"):
        problem = one_pass_problem(slots)
        if problem is None:
            named = "named by optim.implementation" if wanted != "auto" else "preferred"
            what = "one pass clips, updates masters and writes parameters of lower precision"
            return OnePassAdamW(slots, config), Choice("triton", f"{named}; {what}")
        reasons.append(f"not triton: {problem}")
    for name in candidates:
        probe = found[name]()
        reason = _fused(probe, slots)
        if reason is None:
            backend, what = _bind(probe, slots, config)
            named = "named by optim.implementation" if wanted != "auto" else "preferred"
            return backend, Choice(name, "; ".join([named, what, *reasons]))
        reasons.append(f"not {name}: {reason}")
    if wanted in (*found, "triton"):
        raise BackendError(
            f"the optimiser implementation that was named cannot run: optim.implementation={wanted}; "
            f"{'; '.join(reasons)}. Use optim.implementation=auto or torch."
        )
    backend, what = _torch(slots, config)
    why = what if wanted == "torch" else "; ".join([what, *reasons])
    return backend, Choice("torch", why)
