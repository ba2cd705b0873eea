"""`isozyme bench train`: tokens a second and MFU of whole training steps, ours and Hugging Face's with FSDP2.

Each contender runs in fresh processes, one a GPU, so that none inherits another's memory. Ranks are started
here, or are those that torchrun or srun started: then each of them starts one child a contender.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isozyme.core.errors import ConfigError, did_you_mean
from isozyme.core.topology import Topology
from isozyme.launch.bench_contenders import precisions_of
from isozyme.launch.bench_rank import PEERS, Order
from isozyme.launch.bench_workload import Workload
from isozyme.launch.environment import RankEnvironment
from isozyme.launch.local import STOPPED, run_ranks
from isozyme.moe.experts.registry import BACKENDS

Say = Callable[[str], None]
_ROUTING = "routing="


@dataclass(frozen=True, kw_only=True)
class TrainContender:
    """One way to run the workload."""

    name: str
    """A backend of the registry or `auto`, or a peer."""
    precision: str
    settings: tuple[str, ...] = ()
    """Further `key=value` that this contender alone has; `routing=…` is not of the run but of its routers."""

    @property
    def kind(self) -> str:
        """`isozyme` or `peer`."""
        return "peer" if self.name in PEERS else "isozyme"

    @property
    def routing(self) -> str | None:
        """What its routers are made to choose; None if they choose by themselves."""
        found = [each.removeprefix(_ROUTING) for each in self.settings if each.startswith(_ROUTING)]
        return found[-1] if found else None

    def overrides(self) -> list[str]:
        """The settings that make a run this contender."""
        experts = "auto" if self.kind == "peer" else self.name
        own = [each for each in self.settings if not each.startswith(_ROUTING)]
        return [f"precision={self.precision}", f"model.moe.experts={experts}", *own]


def train_contenders(
    backends: Sequence[str], precisions: Sequence[str], peers: Sequence[str]
) -> list[TrainContender]:
    """The contenders that the command line names.

    Args:
        backends: `te` is one backend in each of `precisions`, `te@fp8_current` in one, `grouped_fp8` in its
            own, `auto+optim.sharded=true+optim.overlap_reduce=true` one with settings of its own, and
            `auto+routing=balanced` one whose routers choose as `isozyme.launch.bench_routing` says.
        precisions: for backends without one.
        peers: names of `PEERS`.

    Raises:
        ConfigError: if a name is unknown.
    """
    known = ["auto", *(each.name for each in BACKENDS)]
    found = []
    for text in backends:
        what, *settings = text.split("+")
        name, at, precision = what.partition("@")
        if name not in known:
            raise ConfigError(f"unknown expert backend: --backends={text}. {did_you_mean(name, known)}")
        found += [
            TrainContender(name=name, precision=p, settings=tuple(settings))
            for p in ([precision] if at else precisions_of(name, precisions))
        ]
    for name in peers:
        if name not in PEERS:
            raise ConfigError(f"unknown peer: --peers={name}. {did_you_mean(name, PEERS)}")
        found.append(TrainContender(name=name, precision=precisions[0]))
    return list(dict.fromkeys(found))


def ladder(contender: TrainContender, settings: Sequence[str]) -> list[TrainContender]:
    """A contender, and the same with each setting added to those before it."""
    return [
        replace(contender, settings=(*contender.settings, *settings[:count]))
        for count in range(len(settings) + 1)
    ]


def bench_train(
    workload: Workload,
    contenders: Sequence[TrainContender],
    *,
    warm_up: int,
    steps: int,
    place: RankEnvironment | None,
    limit_s: float,
    say: Say = print,
) -> Iterator[dict[str, Any]]:
    """Run the contenders one after the other, up to where somebody stops it (Ctrl-C, SIGTERM).

    Args:
        workload: what they run.
        contenders: who runs.
        warm_up: steps that are not timed.
        steps: steps that are.
        place: this process's place, if a launcher made it a rank.
        limit_s: seconds after which a contender is given up (where this process starts the ranks' children).
        say: told what goes on.

    Yields:
        One row each, as soon as it is known; on ranks other than 0 only what this rank saw.
    """
    for number, contender in enumerate(contenders):
        say(f"  running {contender.name} {contender.precision} {' '.join(contender.settings)}".rstrip())
        row: dict[str, Any] = {
            "name": contender.name,
            "kind": contender.kind,
            "precision": contender.precision,
            "contender_settings": list(contender.settings),
        }
        with tempfile.TemporaryDirectory(prefix="isozyme-bench-") as folder:
            order = Order(
                recipe=workload.recipe,
                overrides=[*workload.overrides, *contender.overrides()],
                contender=contender.name,
                routing=contender.routing,
                warm_up=warm_up,
                steps=steps,
                result=str(Path(folder) / "result"),
            )
            command = [sys.executable, "-m", "isozyme.launch.bench_rank", order.argument()]
            if place is None:
                topology = Topology(workload.config(*contender.overrides()).layout)
                code = run_ranks(command, topology)
                if code in STOPPED:
                    say("  stopped")
                    return
                ranks = range(topology.world_size)
            else:
                code = _child(command, place, number, limit_s)
                ranks = range(place.rank, place.rank + 1)
            row |= _found(order, ranks, code)
        if row["status"] != "ok":
            say(f"    {row['status']}: {row['reason']}")
        yield row


def _child(command: Sequence[str], place: RankEnvironment, number: int, limit_s: float) -> int:
    """A process that takes this rank's place, at a port that no contender has used."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "TORCHELASTIC_USE_AGENT_STORE"  # the children's rank 0 keeps a store of their own
    }
    place.export(env)
    env["MASTER_PORT"] = str(place.master_port + 1 + number)
    try:
        return subprocess.run(list(command), env=env, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def _found(order: Order, ranks: Sequence[int], code: int) -> Mapping[str, Any]:
    """What the ranks wrote: the first one's result, or the failure that came first."""
    written = [order.path(rank) for rank in ranks if order.path(rank).exists()]
    failures = [path for path in written if json.loads(path.read_text())["status"] == "FAILED"]
    if failures:
        return json.loads(min(failures, key=lambda path: path.stat().st_mtime).read_text())
    if code != 0 or not written:
        reason = "took too long" if code == 124 else f"the ranks ended with code {code} and left no result"
        return {"status": "FAILED", "reason": reason}
    return json.loads(written[0].read_text())
