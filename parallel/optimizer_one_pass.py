"""AdamW in one pass behind the interface of the other implementations (docs/adr/0005)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from isozyme.core.config import OptimConfig
from isozyme.parallel.kernels.adamw import Coefficients, Update, unmet

if TYPE_CHECKING:
    from isozyme.parallel.optimizer_backends import Slot


def one_pass_problem(slots: Sequence[Slot]) -> str | None:
    """Why the Triton kernel cannot update these tensors, in words; None if it can."""
    if not slots:
        return "there is nothing to update"
    if any(slot.master.device.type != "cuda" for slot in slots):
        return "its kernel runs on CUDA"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return unmet([_update(slot, 0.0) for slot in slots])


class OnePassAdamW:
    """The Triton kernel bound to its tensors; see `AdamW` of `isozyme.parallel.optimizer_backends`.

    Args:
        slots: what is updated.
        config: betas, eps, weight decay.
    """

    writes_copies = True

    def __init__(self, slots: Sequence[Slot], config: OptimConfig) -> None:
        from isozyme.parallel.kernels.triton_adamw import AdamWLaunches

        self._config, self._updates = config, 0
        decay = config.weight_decay
        self._launch = AdamWLaunches([_update(slot, decay if slot.decay else 0.0) for slot in slots])

    def set_updates(self, count: int) -> None:
        """Go on as after `count` updates (for the bias correction)."""
        self._updates = count

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update every master, its moments and its copy once; gradients are read times `scale`."""
        self._updates += 1
        beta1, beta2 = self._config.betas
        self._launch(
            Coefficients(
                lr=lr, beta1=beta1, beta2=beta2, eps=self._config.eps, scale=scale, step=self._updates
            )
        )


def _update(slot: Slot, weight_decay: float) -> Update:
    return Update(
        master=slot.master,
        grad=slot.grad,
        exp_avg=slot.exp_avg,
        exp_avg_sq=slot.exp_avg_sq,
        copy=slot.copy,
        weight_decay=weight_decay,
    )
