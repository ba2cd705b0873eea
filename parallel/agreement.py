"""Steps that may fail on one rank alone, such as writing a file: all ranks go on, or all raise alike."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from isozyme.core.errors import CheckpointError
from isozyme.parallel.communicator import Communicator

T = TypeVar("T")


def together(world: Communicator, what: str, action: Callable[[], T]) -> list[T]:
    """Run `action`, which must not communicate, and give every rank the results of all.

    Raises:
        CheckpointError: the same on all ranks, if the action failed on any; so nobody waits for a rank that
            has given up.
    """
    error: str | None = None
    value: T | None = None
    try:
        value = action()
    except Exception as failure:  # whatever it is, the others must hear of it
        error = _describe(failure)
    found: list[tuple[str | None, T]] = world.all_gather_object((error, value))
    errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(found) if error is not None]
    if errors:
        raise CheckpointError(
            "\n  - ".join([f"{what} failed on {len(errors)} of {world.size} ranks", *errors])
        )
    return [value for _, value in found]


def _describe(failure: Exception) -> str:
    if isinstance(failure, CheckpointError):
        return str(failure)
    if isinstance(failure, OSError):
        where = f" ({failure.filename})" if failure.filename else ""
        full = ". Free some space, or save elsewhere" if failure.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{failure.strerror or failure}{where}{full}"
    return f"{type(failure).__name__}: {failure}"
