"""Starts the ranks of a run on this host and watches over them.

Each rank is a process of its own that runs the same command with the variables of torchrun set, so that a
rank behaves alike under every launcher. The launcher keeps the rendezvous store itself (no port is guessed),
blames the rank whose error came first and was not merely the loss of a peer, and leaves no process behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from isozyme.core.topology import Topology
from isozyme.launch import failures
from isozyme.launch.environment import ERROR_FOLDER, PARENT, RankEnvironment, threads_per_rank
from isozyme.launch.failures import Failure

_POLL_S = 0.05
_WORDS_S = 2.0
"""After the first failure the other ranks have this long to fail by themselves and say why."""
STOPPED = frozenset({128 + signal.SIGINT, 128 + signal.SIGTERM})
"""Exit codes of a run that was asked to stop before it was done."""
_SAVE_S = 60.0
"""After a request to stop, the ranks have this long to finish their step and save."""


def run_ranks(command: Sequence[str], topology: Topology, *, save_s: float = _SAVE_S) -> int:
    """Run `command` once for each rank of the topology on this host, and wait.

    SIGTERM, SIGUSR1 and the first Ctrl-C ask the ranks to finish their step and save a checkpoint; a second
    Ctrl-C kills them.

    Args:
        command: program and arguments of one rank.
        topology: gives the number of ranks and, for messages, their coordinates.
        save_s: seconds that the ranks have after such a request before they are killed.

    Returns:
        The exit code of the run, as `isozyme.launch.failures` lists them.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    with tempfile.TemporaryDirectory(prefix="isozyme-errors-") as folder:
        first = RankEnvironment(
            rank=0,
            world_size=topology.world_size,
            local_rank=0,
            local_world_size=topology.world_size,
            master_port=store.port,
        )
        ranks = _Ranks(command, first, Path(folder))
        with _requests() as requests:
            try:
                ranks.watch(requests, save_s)
            finally:
                ranks.kill()
        return _conclude(ranks, requests, topology, Path(folder))


@dataclass
class _Requests:
    """Signals that asked the run to stop."""

    received: list[int] = field(default_factory=list)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)

    @property
    def interrupts(self) -> int:
        return self.received.count(signal.SIGINT)


@contextmanager
def _requests() -> Iterator[_Requests]:
    """Collect SIGINT, SIGTERM and SIGUSR1 instead of dying of them."""
    requests = _Requests()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, requests) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ranks:
    """The processes of all ranks."""

    def __init__(self, command: Sequence[str], first: RankEnvironment, folder: Path) -> None:
        self.killed: set[int] = set()
        self.suspended: set[int] = set()
        """Ranks that the launcher killed while they were stopped by a signal such as SIGSTOP."""
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(first.world_size):
            env = _rank_env(replace(first, rank=rank, local_rank=rank), folder)
            self.processes.append(
                # A session of its own: Ctrl-C reaches the launcher alone, which decides what the ranks do.
                subprocess.Popen(list(command), env=env, stdin=subprocess.DEVNULL, start_new_session=True)
            )

    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def failed(self) -> list[int]:
        """Ranks that ended with an error of their own."""
        return [r for r, p in enumerate(self.processes) if p.poll() not in (None, 0) and r not in self.killed]

    def watch(self, requests: _Requests, save_s: float) -> None:
        """Return when all ranks have ended, or when it is time to kill those that have not."""
        deadline = float("inf")
        passed_on = False
        while self.running() and time.monotonic() < deadline and requests.interrupts < 2:
            if self.failed():
                deadline = min(deadline, time.monotonic() + _WORDS_S)
            elif requests.received and not passed_on:
                passed_on = True
                deadline = time.monotonic() + save_s
                print(
                    "isozyme: finishing the step, then saving (Ctrl-C again stops at once)", file=sys.stderr
                )
                for rank in self.running():
                    self.processes[rank].send_signal(signal.SIGTERM)
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End every rank that still runs."""
        for rank in self.running():
            self.killed.add(rank)
            if _is_suspended(self.processes[rank].pid):
                self.suspended.add(rank)
            self.processes[rank].kill()
        for process in self.processes:
            process.wait()


def _is_suspended(pid: int) -> bool:
    """Whether the kernel holds a process back (Linux; elsewhere nobody can tell)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


def _rank_env(rank: RankEnvironment, folder: Path) -> Mapping[str, str]:
    env = dict(os.environ)
    rank.export(env)
    env[PARENT] = str(os.getpid())
    env[ERROR_FOLDER] = str(folder)
    env["TORCHELASTIC_USE_AGENT_STORE"] = (
        "True"  # torch: the store at MASTER_PORT exists; rank 0 joins it too
    )
    env["TORCHELASTIC_RESTART_COUNT"] = "0"
    env.setdefault("OMP_NUM_THREADS", str(threads_per_rank(rank.local_world_size)))
    return env


def _conclude(ranks: _Ranks, requests: _Requests, topology: Topology, folder: Path) -> int:
    """Print who failed and why, and give the exit code."""
    left = failures.read_all(folder)
    told = {failure.rank for failure in left}
    mute = [rank for rank in ranks.failed() if rank not in told]
    # The launcher passes a request on as SIGTERM, of which a rank dies that does not step yet, or no more.
    obeyed = [r for r in mute if requests.received and ranks.processes[r].returncode == -signal.SIGTERM]
    silent = [_silent(rank, ranks) for rank in mute if rank not in obeyed]
    silent += [_suspended(rank) for rank in sorted(ranks.suspended - told)]
    cause = failures.root_cause([*silent, *left])
    if cause is None:
        if obeyed or ranks.killed:
            print("isozyme: stopped between steps: nothing more was saved", file=sys.stderr)
        stopped = 128 + signal.SIGINT if requests.interrupts else 0
        return stopped or (128 + signal.SIGTERM if obeyed or ranks.killed else 0)
    at = " ".join(f"{axis}={index}" for axis, index in topology.coordinates(cause.rank).items())
    print(failures.block(cause, topology.world_size, f" ({at})"), file=sys.stderr)
    for failure in [*silent, *left]:
        if failure.rank == cause.rank:
            continue
        if (failure.kind, failure.message) == (cause.kind, cause.message):
            print(f"  rank {failure.rank} says the same", file=sys.stderr)
            continue
        first_line = failure.message.splitlines()[0] if failure.message else ""
        print(f"  rank {failure.rank} then: {failure.kind}: {first_line}", file=sys.stderr)
    for rank in sorted(ranks.killed - ranks.suspended - told):
        print(f"  rank {rank} said nothing and was stopped by the launcher", file=sys.stderr)
    return cause.exit_code


def _suspended(rank: int) -> Failure:
    """The failure of a rank that was held back while the others waited for it."""
    text = "the process was suspended (SIGSTOP or the like), and the others waited for it in vain."
    return Failure(rank, "Suspended", text, exit_code=5, at=time.time())


def _silent(rank: int, ranks: _Ranks) -> Failure:
    """The failure of a rank that left no error file: killed by a signal, or ended by os._exit."""
    code = ranks.processes[rank].returncode
    if code < 0:
        name = signal.Signals(-code).name
        advice = " The kernel does so when memory runs out (see dmesg)." if -code == signal.SIGKILL else ""
        return Failure(rank, "Killed", f"the process was ended by {name}.{advice}", 128 - code, time.time())
    return Failure(rank, "Exit", f"the process ended with code {code} and left no error.", code, time.time())
