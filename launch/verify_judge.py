"""The verdict on one setting: does it do what one rank alone does, and if not, what is wrong?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from isozyme.core.errors import BackendError, ConfigError, IsozymeError
from isozyme.core.topology import DENSE_AXES, EXPERT_AXES, Topology
from isozyme.launch.verify_compare import Comparison, compare
from isozyme.launch.verify_flips import changed_choices, changed_drops, first_differences
from isozyme.launch.verify_hints import SHOWN, hints, symptoms
from isozyme.launch.verify_routing import Flip, Key, WindowRouting
from isozyme.launch.verify_run import Experiment, Observation, Setting, observe, reference_setting
from isozyme.launch.verify_tamper import Fault

TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Largest relative difference of losses, gradients, norm and weights."""
FLIP_GAP: Mapping[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Largest difference of two scores that rounding may rank either way."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one setting compares with the reference."""

    setting: Setting
    comparison: Comparison | None
    """None if the run ended with an error."""
    flips: Sequence[Flip] = ()
    error: str | None = None

    @property
    def tolerance(self) -> float:
        """The largest difference allowed."""
        return TOLERANCE[self.setting.dtype]

    @property
    def wrong_flips(self) -> list[Flip]:
        """The flips that rounding does not explain."""
        return [flip for flip in self.flips if not flip.gap <= FLIP_GAP[self.setting.dtype]]

    @property
    def passed(self) -> bool:
        """Whether everything agrees."""
        found = self.comparison
        if found is None or self.error is not None or self.wrong_flips or found.missing:
            return False
        return (
            found.loss <= self.tolerance and found.norm <= self.tolerance and not found.beyond(self.tolerance)
        )

    def explain(self) -> str:
        """Everything that is wrong, the worst first, and what it points to."""
        setting = self.setting
        dtype = str(setting.dtype).removeprefix("torch.")
        head = f"{setting.layout}, {dtype}, dispatcher {setting.dispatcher}, experts {setting.experts}"
        lines = [self.error] if self.error is not None else []
        wrong = self.wrong_flips
        lines += [str(flip) for flip in wrong[:SHOWN]]
        if len(wrong) > SHOWN:
            lines.append(f"and {len(wrong) - SHOWN} more flips; later ones may follow from the first")
        if self.comparison is not None:
            topology = Topology(setting.layout)
            sizes = {axis: topology.size(axis) for axis in dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))}
            lines += symptoms(self.comparison, self.tolerance)
            pointers = hints(self.comparison, self.tolerance, sizes, topology.world_size)
            lines += [f"hint: {each}" for each in pointers]
        return "\n  - ".join([head, *lines])


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one rank alone did, in one dtype."""

    observation: Observation

    @property
    def routings(self) -> Mapping[Key, WindowRouting]:
        """The routing of every window."""
        return self.observation.routings[0]

    @staticmethod
    def of(experiment: Experiment, dtype: torch.dtype) -> Reference:
        """Run it."""
        return Reference(observation=observe(experiment, reference_setting(dtype)))


def judge(
    experiment: Experiment, setting: Setting, reference: Reference, *, fault: Fault | None = None
) -> Outcome:
    """Run one setting and compare it with the reference.

    In fp64 the layout routes by itself; only where its choices, or what capacity drops, differ is it run
    again with those of the reference, to see by what gap. In fp32 they are always replayed.

    Args:
        experiment: model and data.
        setting: where and how.
        reference: of the same experiment, in the same dtype.
        fault: what shall go wrong.

    Raises:
        ConfigError: if the model cannot run at the layout.
        BackendError: if the experts' backend cannot run here.
        Exception: with a `fault`, what is not one of the package's own errors; else any error is an outcome.
    """
    try:
        found, flips = _run(experiment, setting, reference, fault)
    except (ConfigError, BackendError):
        raise
    except Exception as error:
        if fault is not None and not isinstance(error, IsozymeError):
            raise  # then it is the fault that does not work
        return Outcome(setting=setting, comparison=None, error=f"{type(error).__name__}: {error}")
    lr = setting.lr(experiment.config)
    comparison = compare(found.values, reference.observation.values[0], lr)
    return Outcome(setting=setting, comparison=comparison, flips=flips)


def _run(
    experiment: Experiment, setting: Setting, reference: Reference, fault: Fault | None
) -> tuple[Observation, list[Flip]]:
    """The run to compare, and how its routing differs from that of the reference."""
    differs: list[Flip] = []
    if setting.exact:
        native = observe(experiment, setting, fault=fault)
        num_real, batch = experiment.windows.num_real, experiment.config.train.global_batch
        chosen = [
            flip
            for routings in native.routings
            for flip in changed_choices(routings, reference.routings, num_real)
        ]
        differs = first_differences(chosen, changed_drops(native.routings, reference.routings), batch)
        if not differs:
            return native, []
    replayed = observe(experiment, setting, replay=reference.routings, fault=fault)
    known = {flip.place for flip in replayed.flips}
    # What differs by itself but not when replayed (or routers cannot say) is excused by its own gap alone.
    return replayed, _ordered([*replayed.flips, *(flip for flip in differs if flip.place not in known)])


def _ordered(flips: Sequence[Flip]) -> list[Flip]:
    """Each once (all ranks of a window report the same), windows in order, which is that of the steps."""
    unique = {flip.place: flip for flip in sorted(flips, key=lambda f: f.gap)}
    return sorted(unique.values(), key=lambda f: (f.window, f.layer, f.position))
