"""What the ranks of one simulated world share: their calls, matched and completed, and who waits for whom.

A call is posted by its rank and completed when those that belong to it have been posted. Faults and delays of
tests strike here, and here it is seen that ranks disagree, that a rank never waited, or that none can go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from isozyme.core.errors import CommunicationError
from isozyme.parallel.communicator import Call, Pending
from isozyme.parallel.simulated_baton import Baton, Schedule
from isozyme.parallel.simulated_match import (
    Post,
    check_fit,
    check_message,
    complete,
    copy_of_input,
    unchanged,
)
from isozyme.parallel.trace import Record, caller

_MAX_POLLS = 10_000


@dataclass(frozen=True)
class Fault:
    """An error to be raised on a rank instead of one of its communicator calls (the first has number 0)."""

    rank: int
    call: int
    error: Exception


@dataclass(frozen=True)
class Delay:
    """A rank that makes one of its communicator calls only when no other rank can go on."""

    rank: int
    call: int


class SimulatedPending(Pending):
    """A call of a simulated rank that may wait for the calls of others."""

    def __init__(self, shared: Shared, post: Post) -> None:
        self._shared, self._post, self._waited, self._polls = shared, post, False, 0

    def wait(self) -> Any:
        post = self._post
        if self._waited:
            return self._result()
        self._shared.wait(post)
        self._waited = True
        if post.call.output is not None and post.call.kind != "send":
            with torch.no_grad():
                post.call.output.copy_(post.received)
        return self._result()

    def _result(self) -> Any:
        return self._post.received if self._post.call.output is None else self._post.call.output

    def arrived(self) -> bool:
        """Let the other ranks run, then tell whether the call is complete."""
        self._shared.baton.offer(self._post.rank)
        self._polls += 1
        if self._polls > _MAX_POLLS and not self._post.done:
            raise self._shared.baton.fail(
                CommunicationError(
                    f"a call was polled {_MAX_POLLS} times and is not complete: {self._post} over "
                    f"{self._post.where()} for rank {', '.join(map(str, self._post.missing()))}. "
                    "Call wait(), or make the missing call."
                ),
                self._post.rank,
            )
        return self._post.done


class Group:
    """What the ranks of one group have called and not yet completed."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self._rounds: dict[int, dict[int, Post]] = {}
        self._made = [0] * len(ranks)
        self._mail: dict[tuple[int, int, int], deque[Post]] = {}

    def add(self, post: Post) -> Sequence[Post]:
        """Match a new call with those of the other ranks; returns the calls that this completes."""
        if post.call.kind in ("send", "recv"):
            return self._add_message(post)
        number = self._made[post.member]
        self._made[post.member] += 1
        calls = self._rounds.setdefault(number, {})
        check_fit([calls[other] for other in sorted(calls)], post)
        calls[post.member] = post
        post.together = calls
        if len(calls) < len(self.ranks):
            return ()
        del self._rounds[number]
        ordered = [calls[member] for member in range(len(self.ranks))]
        with torch.no_grad():
            complete(ordered)
        return ordered

    def _add_message(self, post: Post) -> Sequence[Post]:
        peer = post.call.peer
        assert peer is not None
        path = (post.member, peer) if post.call.kind == "send" else (peer, post.member)
        queue = self._mail.setdefault((*path, post.call.tag), deque())
        if not queue or queue[0].call.kind == post.call.kind:
            queue.append(post)
            return ()
        other = queue.popleft()
        send, recv = (post, other) if post.call.kind == "send" else (other, post)
        check_message(send, recv)
        recv.received = send.sent
        send.done = recv.done = True
        return (send, recv)


class Shared:
    """All that the ranks of one simulated world have in common."""

    def __init__(self, size: int, schedule: Schedule, seed: int, faults: Sequence[Fault | Delay]) -> None:
        self.baton = Baton(size, schedule, self._stuck, seed)
        self.records: list[list[Record]] = [[] for _ in range(size)]
        self._faults = {(fault.rank, fault.call): fault for fault in faults}
        self._splits: list[tuple[int, str, list[tuple[int, ...]], list[Group]]] = []
        self._split_calls = [0] * size
        self._joined: dict[str, tuple[int, Group]] = {}
        self._open: list[dict[Post, None]] = [{} for _ in range(size)]
        self._waiting: dict[int, Post] = {}
        self._returned: set[int] = set()

    def split(self, rank: int, number: int, name: str, partition: list[tuple[int, ...]]) -> list[Group]:
        """The groups of the `number`-th split, which must be the same on all ranks.

        Raises:
            ValueError: if the partition does not name every rank once.
            CommunicationError: if another rank has split otherwise.
        """
        self.baton.check()
        everyone = list(range(len(self.records)))
        if sorted(member for part in partition for member in part) != everyone:
            raise ValueError(
                f"a split must name each of the {len(everyone)} ranks once: "
                f"name={name}, partition={partition}."
            )
        if number == len(self._splits):
            self._splits.append((rank, name, partition, [Group(name, part) for part in partition]))
        first, its_name, its_partition, groups = self._splits[number]
        if (its_name, its_partition) != (name, partition):
            raise self.baton.fail(
                CommunicationError(
                    f"ranks must split the world alike, in the same order: split {number} is "
                    f"{its_name} {its_partition} on rank {first}, but {name} {partition} on rank {rank}. "
                    "Give the same partition on all ranks."
                ),
                rank,
            )
        self._split_calls[rank] += 1
        return groups

    def join(self, rank: int, key: str, name: str, ranks: tuple[int, ...]) -> Group:
        """The group of this key, which must have the same ranks on all of its members."""
        self.baton.check()
        first, group = self._joined.setdefault(key, (rank, Group(name, ranks)))
        if group.ranks != ranks:
            raise self.baton.fail(
                CommunicationError(
                    f"ranks must build the same groups in the same order: group {key} has the ranks "
                    f"{list(group.ranks)} on rank {first}, but {list(ranks)} on rank {rank} at {caller()}. "
                    "Build every group on all ranks, also on those that are not in it."
                ),
                rank,
            )
        return group

    def post(self, group: Group, member: int, call: Call) -> SimulatedPending:
        """Make a call on behalf of a rank."""
        self.baton.check()
        rank, source = group.ranks[member], caller()
        fault = self._faults.get((rank, len(self.records[rank])))
        if isinstance(fault, Fault):
            raise self.baton.fail(fault.error, rank)
        if fault is not None:
            self.baton.hold(rank)
        self.records[rank].append(Record.of(call, group.name, group.ranks, member, source))
        post = Post(rank, member, group.name, group.ranks, call, source, copy_of_input(call))
        self._open[rank][post] = None
        try:
            completed = group.add(post)
        except CommunicationError as error:
            raise self.baton.fail(error, rank) from None
        for other in completed:
            if self._waiting.get(other.rank) is other:
                self.baton.wake(other.rank)
        return SimulatedPending(self, post)

    def wait(self, post: Post) -> None:
        """Block a rank until its call is complete."""
        rank = post.rank
        self._open[rank].pop(post)
        if post.done:
            self.baton.offer(rank)
        else:
            self._waiting[rank] = post
            self.baton.block(rank)
            del self._waiting[rank]
        if not unchanged(post):
            raise self.baton.fail(
                CommunicationError(
                    f"a buffer must not change while it is being sent: rank={rank}, group={post.where()}; "
                    f"{post}, and the input was modified before wait(). Wait first, or send a copy."
                ),
                rank,
            )

    def check_finished(self, rank: int) -> None:
        """A rank returns: it must have waited for everything that it started.

        Raises:
            CommunicationError: if it has not.
        """
        for post in self._open[rank]:
            raise CommunicationError(
                f"a call that was started must be waited for: rank={rank}, group={post.where()}; "
                f"{post}, but the rank returned before wait(). Call wait() on the pending result."
            )
        self._returned.add(rank)

    def check_splits_complete(self) -> None:
        """The run is over: every rank must have made every split.

        Raises:
            CommunicationError: if one has not.
        """
        fewest = min(range(len(self._split_calls)), key=self._split_calls.__getitem__)
        if self._split_calls[fewest] != len(self._splits):
            raise CommunicationError(
                f"every rank must make every split: rank {fewest} made {self._split_calls[fewest]} of "
                f"{len(self._splits)}; it lacks {self._splits[self._split_calls[fewest]][1]}. "
                "Build the groups on all ranks."
            )

    def _stuck(self) -> CommunicationError:
        lines = [
            f"  rank {rank} waits in {post.call.describe()} over {post.where()} at {post.source} "
            f"for rank {', '.join(map(str, post.missing()))}"
            for rank, post in sorted(self._waiting.items())
        ]
        for rank in sorted(self._returned):
            last = [f" after {r.kind} over {r.group} at {r.source}" for r in self.records[rank][-1:]]
            lines.append(f"  rank {rank} has returned{''.join(last)}")
        return CommunicationError(
            f"deadlock: {len(self._waiting)} of {len(self.records)} ranks wait and none can go on\n"
            + "\n".join(lines)
            + "\nMake the same calls in the same order on all ranks of each group."
        )
