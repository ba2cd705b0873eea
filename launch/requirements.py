"""What a run needs and this machine lacks, said in full before anything starts.

`Machine` is what there is; `check` compares it with a configuration and lists every unmet requirement at
once. Tests describe machines that they do not have.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from isozyme.core import accelerators, transformer_engine
from isozyme.core.config import RunConfig
from isozyme.core.errors import BackendError, ConfigError, Rules
from isozyme.core.precision import NEEDS_TRANSFORMER_ENGINE, TRAITS, precision_problems
from isozyme.models.attention import attention_facts
from isozyme.models.norm import choose_norm
from isozyme.moe.experts.registry import ExpertSetting, choose_backend
from isozyme.parallel.attention_kernels import choose_attention


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this host offers to a run."""

    cuda_devices: int
    no_cuda: str
    """Why there is no CUDA device, if there is none."""
    capability: Callable[[], tuple[int, int]]
    """Compute capability of the first CUDA device, such as (9, 0) for Hopper; asked only if there is one."""
    no_transformer_engine: Callable[[], str | None]
    """Why Transformer Engine cannot be used, None if it can; asked only if needed, as it takes seconds."""
    no_fused_adam: Mapping[str, Callable[[], str | None]]
    """Optimiser implementation → why it cannot be used here, None if it can."""

    @staticmethod
    def here() -> Machine:
        """This host. Counting devices and asking nothing more leaves them untouched."""
        return Machine(
            cuda_devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
            no_cuda="torch finds no CUDA device"
            if torch.version.cuda
            else "this torch is built without CUDA",
            capability=torch.cuda.get_device_capability,
            no_transformer_engine=transformer_engine.why_not,
            no_fused_adam={
                "triton": lambda: None if find_spec("triton") else "triton is not installed",
                "te": lambda: accelerators.te_fused_adam().why_not,
                "apex": lambda: accelerators.apex_fused_adam().why_not,
            },
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a check settled: the device type and dtypes, and why, for the log."""

    device: str
    why_device: str
    dtype: torch.dtype
    """Of parameters and activations."""


def check(
    config: RunConfig, machine: Machine, *, world_size: int | None = None, local_world_size: int | None = None
) -> Choice:
    """Compare what the run needs with what there is.

    Args:
        config: a composed configuration.
        machine: what this host offers.
        world_size: the number of ranks, if a launcher has started them; else the layout decides.
        local_world_size: ranks on this host; all of them if None.

    Returns:
        The device and dtype to use.

    Raises:
        ConfigError: if the configuration itself is broken (then also everything that the machine lacks).
        BackendError: if the machine lacks something, all of it listed.
    """
    broken = Rules(config.name)
    broken.extend(config.problems(world_size))
    lacking = Rules(config.name)
    ranks = local_world_size or world_size or _ranks(config)
    device, why = choose_device(config, machine, ranks)
    if config.device == "cuda":
        lacking.check(
            machine.cuda_devices >= ranks,
            f"every rank needs a CUDA device of its own: device=cuda, {ranks} ranks on this host, "
            f"{machine.cuda_devices} devices"
            + (f" ({machine.no_cuda})" if not machine.cuda_devices else "")
            + ". Use device=cpu, or a layout of fewer ranks.",
        )
    lacking.check(
        device == "cuda" or config.device == "cpu" or not config.train.cuda_graph,
        f"CUDA graphs need CUDA: train.cuda_graph=true, and device=auto found none ({why}). Set "
        "train.cuda_graph=false.",
    )
    precision = _precision_problems(config, machine, device)
    lacking.extend(precision)
    if not precision or config.model.moe.experts != "auto":  # else every backend says the same again
        lacking.extend(_experts_problems(config, device))
    lacking.extend(_kernel_problems(config, device))
    lacking.extend(_optimiser_problems(config, machine, device))
    if broken.broken:
        broken.extend(lacking.broken)
        broken.raise_if_broken()
    if lacking.broken:
        count = len(lacking.broken)
        head = f"{config.name}: this machine lacks {count} thing{'s' if count > 1 else ''} that the run needs"
        raise BackendError("\n  - ".join([head, *lacking.broken]))
    return Choice(device=device, why_device=why, dtype=TRAITS[config.precision].dtype)


def choose_device(config: RunConfig, machine: Machine, ranks: int) -> tuple[str, str]:
    """The device type (`cpu` or `cuda`) and the reason."""
    if config.device != "auto":
        return config.device, "as configured"
    if machine.cuda_devices >= ranks:
        return "cuda", f"auto: {machine.cuda_devices} CUDA devices for {ranks} ranks on this host"
    if machine.cuda_devices == 0:
        return "cpu", f"auto: {machine.no_cuda}"
    return "cpu", f"auto: {machine.cuda_devices} CUDA devices are too few for {ranks} ranks on this host"


def output_folder(config: RunConfig) -> Path:
    """The run's folder, made if needed and proven writable.

    Raises:
        ConfigError: if it cannot be made or written.
    """
    folder = Path(config.out) if config.out is not None else Path("runs") / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"the output folder must be writable: out={folder} ({folder.absolute()}): {reason}"
            f" (user id {os.getuid()}). Set out=PATH."
        ) from error
    return folder


def _ranks(config: RunConfig) -> int:
    whole = config.layout.resolved()
    return whole.tp * whole.cp * (whole.dp or 1) * whole.pp


def _precision_problems(config: RunConfig, machine: Machine, device: str) -> list[str]:
    """Why the device cannot compute in the configured precision, or what package that needs."""
    precision = config.precision
    on_cuda = device != "cpu"
    if precision not in NEEDS_TRANSFORMER_ENGINE:
        capability = machine.capability() if on_cuda and machine.cuda_devices else None
        return [f"{each}. Use precision=bf16." for each in precision_problems(precision, capability)]
    if not on_cuda:
        instead = "bf16, fp32 or mxfp8_emulated" if precision == "mxfp8" else "bf16 or fp32"
        return [
            f"no CPU computes in {precision}: precision={precision}, device=cpu"
            + (f" ({machine.no_cuda})" if not machine.cuda_devices else "")
            + f". Use precision={instead}."
        ]
    instead = {"mxfp8": "bf16, fp8_current (Hopper) or mxfp8_emulated"}.get(precision, "bf16")
    capability = machine.capability() if machine.cuda_devices else None
    problems = [f"{each}. Use precision={instead}." for each in precision_problems(precision, capability)]
    reason = machine.no_transformer_engine()
    if reason is not None:
        problems.append(
            f"{precision} needs Transformer Engine: precision={precision}; {reason}. "
            "Use precision=bf16, or install isozyme[te]."
        )
    return problems


def _experts_problems(config: RunConfig, device: str) -> list[str]:
    """Why the named expert backend (with `auto`: every one) cannot run here, in the registry's own words."""
    model, layout = config.model, config.layout
    if "M" not in model.layer_kinds():
        return []
    # A CUDA device that is not there cannot be asked; "meta" stands for one whose abilities are unknown.
    there = device == "cpu" or torch.cuda.is_available()
    setting = ExpertSetting(
        device=torch.device(device if there else "meta"),
        dtype=TRAITS[config.precision].dtype,
        num_local_experts=max(model.moe.router.num_experts // max(layout.ep, 1), 1),
        hidden=model.hidden,
        ffn=model.moe.ffn // max(layout.etp, 1),
        precision=config.precision,
        delay_wgrad=model.moe.delay_wgrad,
        cache_quantized=model.moe.cache_quantized_weights,
    )
    try:
        choose_backend(model.moe.experts, setting)
    except BackendError as error:
        return [f"model.moe.experts={model.moe.experts}: {error}".replace("\n", "\n    ")]
    return []


def _kernel_problems(config: RunConfig, device: str) -> list[str]:
    """Why the attention kernel or the norm that was named cannot run here, in the words of the models."""
    if device == "cuda" and not torch.cuda.is_available():
        return []  # a device that is not there cannot be asked
    model, where, dtype = config.model, torch.device(device), TRAITS[config.precision].dtype
    problems = []
    try:
        choose_attention(model.attention.kernel, attention_facts(model, where, dtype))
    except BackendError as error:
        problems.append(str(error))
    try:
        choose_norm(model.norm, where, dtype)
    except BackendError as error:
        problems.append(str(error))
    return problems


def _optimiser_problems(config: RunConfig, machine: Machine, device: str) -> list[str]:
    """Why the named optimiser implementation cannot run."""
    name = config.optim.implementation
    if name in ("auto", "torch"):
        return []
    reason = f"it needs CUDA, and device={device}" if device == "cpu" else machine.no_fused_adam[name]()
    if reason is None:
        return []
    return [
        f"the optimiser {name} cannot run here: optim.implementation={name}; {reason}. Use auto or torch."
    ]
