"""The configuration of training: the optimiser, and how long and how much at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isozyme.core.errors import Rules


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with warm-up and cosine decay."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.033
    warmup_steps: int = 20
    decay_steps: int | None = None
    """Steps from the start until the learning rate reaches its minimum; the run's steps if null."""
    min_lr_ratio: float = 0.1
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    implementation: Literal["auto", "triton", "te", "apex", "torch"] = "auto"
    main_grad: Literal["fp32", "as_computed"] = "fp32"
    """What gradients are kept in: at least fp32; or, where no other rank adds to them, the parameter's type,
    in which backward computes them. That needs one micro-batch a step, and changes no number."""
    sharded: bool = False
    """Whether masters and moments are dealt out over the replicas of each weight (ZeRO-1)."""
    overlap_reduce: bool = False
    """Whether a layer's gradients are summed over ranks while backward goes on with the layers before it."""
    overlap_gather: bool = False
    """Whether updated parameters are gathered while the next forward goes on; needs sharded."""

    def problems(self, where: str = "optim", micro_batches: int | None = None) -> list[str]:
        """Every broken rule in words; with `micro_batches` of a step also what goes with their number."""
        rules = Rules(where)
        rules.check(self.lr > 0, f"{where}.lr must be positive: {where}.lr={self.lr}.")
        rules.check(self.eps > 0, f"{where}.eps must be positive: {where}.eps={self.eps}.")
        rules.check(
            all(0 <= beta < 1 for beta in self.betas),
            f"{where}.betas must lie in [0, 1): {where}.betas={list(self.betas)}.",
        )
        for name in ("weight_decay", "warmup_steps", "min_lr_ratio", "clip"):
            value = getattr(self, name)
            rules.check(value >= 0, f"{where}.{name} must not be negative: {where}.{name}={value}.")
        rules.check(
            self.decay_steps is None or self.decay_steps >= 1,
            f"{where}.decay_steps must be at least 1, or null for the run's steps: {self.decay_steps}.",
        )
        rules.check(
            self.min_lr_ratio <= 1,
            f"{where}.min_lr_ratio must be at most 1: {where}.min_lr_ratio={self.min_lr_ratio}.",
        )
        rules.check(
            self.sharded or not self.overlap_gather,
            f"only a sharded optimiser gathers parameters: {where}.overlap_gather=true, "
            f"{where}.sharded=false. Set {where}.sharded=true, or leave {where}.overlap_gather out.",
        )
        rules.check(
            self.main_grad == "fp32" or micro_batches in (None, 1),
            f"gradients of several micro-batches are added up in fp32: {where}.main_grad={self.main_grad}, "
            f"micro-batches a step={micro_batches}. Set {where}.main_grad=fp32, or "
            f"train.micro_batch {micro_batches} times as large.",
        )
        return rules.broken


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at once, and how often to look and to save."""

    steps: int = 100
    global_batch: int = 16
    """Windows an optimiser step, over all ranks."""
    micro_batch: int = 4
    """Windows one rank passes through the model at once; the rest is gradient accumulation."""
    eval_every: int = 0
    """Steps between evaluations on the held-out part; 0 evaluates at the end only."""
    eval_windows: int | None = None
    """Held-out windows of one evaluation; all of them if null."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes none but the final weights."""
    keep_checkpoints: int = 2
    log_every: int = 1
    timeout_s: float = 300.0
    """Seconds after which a rank that waits for the others gives up."""
    cuda_graph: bool = False
    """Record forward, backward and reduction of a step in a CUDA graph, and replay it: the device never waits
    for the host. Keeps the memory of one step's activations while training lasts."""

    def micro_batches(self, dp: int | None) -> int | None:
        """Micro-batches of a rank's step at `dp` dense replicas; None if not known or no whole number."""
        per_rank = (dp or 0) * self.micro_batch
        whole = per_rank > 0 and self.global_batch % per_rank == 0
        return self.global_batch // per_rank if whole else None

    def problems(self, where: str = "train", dp: int | None = None) -> list[str]:
        """Every broken rule in words; with `dp` also that the global batch divides."""
        rules = Rules(where)
        for name in ("steps", "global_batch", "micro_batch", "keep_checkpoints", "log_every"):
            value = getattr(self, name)
            rules.check(value >= 1, f"{where}.{name} must be at least 1: {where}.{name}={value}.")
        for name in ("eval_every", "checkpoint_every"):
            value = getattr(self, name)
            rules.check(value >= 0, f"{where}.{name} must not be negative: {where}.{name}={value}.")
        rules.check(
            self.timeout_s > 0, f"{where}.timeout_s must be positive: {where}.timeout_s={self.timeout_s}."
        )
        if dp is not None and not rules.broken:
            unit = dp * self.micro_batch
            rules.check(
                self.global_batch % unit == 0,
                f"global_batch must be a multiple of dp * micro_batch: "
                f"{where}.global_batch={self.global_batch}, "
                f"dp={dp}, {where}.micro_batch={self.micro_batch}; {self.global_batch} % {unit} = "
                f"{self.global_batch % unit}. The nearest is {max(unit, self.global_batch // unit * unit)}.",
            )
        return rules.broken
