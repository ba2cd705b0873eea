"""`isozyme verify --faults`: each fault is made on purpose, and verification must find it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError, divisors
from isozyme.core.topology import Layout
from isozyme.launch.verify_faults import FAULTS
from isozyme.launch.verify_judge import Outcome, Reference, judge
from isozyme.launch.verify_plan import prepare
from isozyme.launch.verify_run import Experiment, Setting
from isozyme.launch.verify_tamper import Fault
from isozyme.models.decoder import build_model
from isozyme.models.types import ModelFactory


def fault_layout(config: RunConfig) -> Layout:
    """The smallest layout at which every fault can show: experts spread over ranks, and replicas of them.

    Raises:
        ConfigError: if the model's experts cannot be spread.
    """
    experts = config.model.moe.router.num_experts
    if experts < 2 or "M" not in config.model.layer_kinds():
        raise ConfigError(
            f"--faults needs experts on several ranks: model.moe.router.num_experts={experts}, "
            f"model.pattern={config.model.pattern}. Use a recipe with at least two experts."
        )
    ep = divisors(experts)[1]
    return Layout(dp=2 * ep, ep=ep)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one fault."""

    fault: Fault
    outcome: Outcome | None
    """None if the recipe's model cannot be cut as the fault wants it."""
    refused: str = ""
    """Then why."""

    @property
    def missed(self) -> bool:
        """Whether verification did not see it."""
        return self.outcome is not None and self.outcome.passed


def find_faults(config: RunConfig, factory: ModelFactory = build_model) -> list[Trial]:
    """Make each fault on purpose and see whether verification finds it.

    Args:
        config: the run; the auxiliary losses are turned on if they are off, capacity off.
        factory: builds the model.

    Raises:
        ConfigError: if the model fails without any fault, which would make this meaningless.
    """
    grounds = Grounds(config, factory)
    return [grounds.trial(fault) for fault in FAULTS]


class Grounds:
    """Models in order, on which faults are made; each is built, and held to one rank, once.

    Args:
        config: see `find_faults`.
        factory: builds the model.
    """

    def __init__(self, config: RunConfig, factory: ModelFactory = build_model) -> None:
        router = config.model.moe.router
        lossy = replace(router, aux_loss=router.aux_loss or 0.01, z_loss=router.z_loss or 1e-3)
        moe = replace(config.model.moe, router=lossy, capacity_factor=None, pad_to_capacity=False)
        self._config = replace(config, model=replace(config.model, moe=moe))
        self._factory = factory
        self._known: dict[object, _Ground | str] = {}

    def trial(self, fault: Fault) -> Trial:
        """Make one fault.

        Raises:
            ConfigError: if the model fails without it.
        """
        layout = fault_layout(self._config) if fault.layout is None else fault.layout
        key = (layout, fault.run, fault.dispatcher)
        if key not in self._known:
            self._known[key] = self._ground(layout, fault)
        ground = self._known[key]
        if isinstance(ground, str):
            return Trial(fault=fault, outcome=None, refused=ground)
        outcome = judge(ground.experiment, ground.setting, ground.reference, fault=fault)
        return Trial(fault=fault, outcome=outcome)

    def _ground(self, layout: Layout, fault: Fault) -> _Ground | str:
        """Where a fault is made, once it is sure that nothing is wrong there; or why it cannot be."""
        config = self._config if fault.run is None else fault.run(self._config)
        try:
            experiment = prepare(config, [layout], self._factory)
        except ConfigError as error:
            return str(error)
        setting = Setting(layout=layout, dtype=torch.float64, dispatcher=fault.dispatcher, experts="loop")
        reference = Reference.of(experiment, torch.float64)
        healthy = judge(experiment, setting, reference)
        if not healthy.passed:
            raise ConfigError(f"the model fails without a fault: {healthy.explain()}\nRepair it first.")
        return _Ground(experiment=experiment, reference=reference, setting=setting)


@dataclass(frozen=True, kw_only=True)
class _Ground:
    experiment: Experiment
    reference: Reference
    setting: Setting
