"""A run's folder belongs to one run at a time, and holds no checkpoints but that run's.

Without this, two runs would write into each other's metrics and checkpoints, and the older checkpoints of an
earlier run, being of later steps, would outlive those of a new one and be taken for its latest.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isozyme.core.config import RunConfig
from isozyme.core.errors import ConfigError
from isozyme.parallel.checkpoint_folder import CHECKPOINTS, checkpoints_of

LOCK = ".lock"
"""File whose lock the running run holds; the kernel frees it when the process ends, however it ends."""


@contextmanager
def claimed(config: RunConfig, folder: Path) -> Iterator[None]:
    """Hold the run's folder while the block lasts. Rank 0 does so for all ranks.

    A file system without locks (some network ones) gives none: there two runs in one folder go unnoticed.

    Args:
        config: the run.
        folder: its folder, which exists and is writable.

    Raises:
        ConfigError: another run holds the folder, or a run that does not resume finds checkpoints in it.
    """
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"a folder belongs to one run at a time: out={folder} is in use by {file.read().strip()}. "
                "Wait for it, or set out=PATH."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK):
                raise
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        _must_be_free(config, folder)
        yield


def _must_be_free(config: RunConfig, folder: Path) -> None:
    """Refuse a new run where checkpoints of another lie."""
    old = checkpoints_of(folder / CHECKPOINTS)
    if config.resume is None and old:
        raise ConfigError(
            "a new run must not mix its checkpoints with those of another: resume=null, and "
            f"{old[0]} exists. Set resume=latest to go on from it, set out=PATH for a new run, or delete the "
            f"folder {folder / CHECKPOINTS}."
        )
