"""The learning rate as a pure function of the step: linear warm-up, then cosine decay to a floor."""

from __future__ import annotations

import math

from isozyme.core.config import OptimConfig


def learning_rate(step: int, config: OptimConfig, total_steps: int) -> float:
    """The learning rate of one optimiser step.

    It rises linearly to `config.lr` over the first `warmup_steps` steps (step 0 gets `lr / warmup_steps`),
    then falls along half a cosine (Loshchilov and Hutter, SGDR, 2017) and is `lr * min_lr_ratio` from step
    `decay_steps - 1` on.

    Args:
        step: number of the step, from 0.
        config: the optimiser's settings.
        total_steps: steps of the whole run; used where `config.decay_steps` is null.

    >>> config = OptimConfig(lr=1.0, warmup_steps=2, decay_steps=5, min_lr_ratio=0.0)
    >>> [round(learning_rate(step, config, total_steps=5), 3) for step in range(6)]
    [0.5, 1.0, 0.75, 0.25, 0.0, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    last = (config.decay_steps if config.decay_steps is not None else total_steps) - 1
    start = max(config.warmup_steps - 1, 0)
    progress = 1.0 if step >= last else (step - start) / (last - start)
    floor = config.lr * config.min_lr_ratio
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
