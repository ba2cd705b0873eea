"""Initial values that depend on the seed and a tensor's global name alone.

Every index of `init_dim` has a generator of its own, seeded by a hash of (seed, name, index). So a rank
draws only its slice, and the slice equals that of the whole tensor at every layout, dtype and device.
(`torch.randn` of a shorter shape is not a prefix of a longer one, and differs by dtype and device; torch's
CPU generator also keeps only 32 bits of a seed, so that among millions of rows some would be equal.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_THREAD_ELEMENTS = 1 << 20
"""Elements that are worth a thread."""
_WORD = 1 << 64


@dataclass(frozen=True)
class Init:
    """A distribution of initial values: `normal` with a standard deviation, or a constant `value`."""

    kind: Literal["normal", "constant"] = "normal"
    value: float = 0.0
    """The standard deviation of `normal`, or the constant."""

    @staticmethod
    def normal(std: float) -> Init:
        """Gaussian with mean 0 and the given standard deviation."""
        return Init("normal", std)

    @staticmethod
    def constant(value: float) -> Init:
        """Every element the same."""
        return Init("constant", value)


def name_key(seed: int, name: str, index: int) -> int:
    """The 128-bit Philox key of one index of one tensor: blake2b over (seed, name, index)."""
    digest = hashlib.blake2b(f"{seed}\x00{name}\x00{index}".encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The normal numbers at each index of `init_dim`."""

    key_of: Callable[[int], int]
    shape: tuple[int, ...]
    """Of a whole row."""
    within: tuple[slice, ...]
    """The part of a row that is wanted."""

    def draw(self, out: npt.NDArray[np.float32], places: range) -> None:
        """Fill some rows of `out`."""
        # A generator made for each row would give the same numbers, and ask the system for entropy each time.
        bits = np.random.Philox(key=0)
        generator, state = np.random.Generator(bits), bits.state
        for place in places:
            key = self.key_of(place)
            state["state"]["key"][:] = key % _WORD, key // _WORD
            bits.state = state
            out[place] = generator.standard_normal(self.shape, dtype=np.float32)[self.within]


def initial_shard(
    *,
    name: str,
    global_shape: tuple[int, ...],
    slices: tuple[slice, ...],
    init: Init,
    seed: int,
    init_dim: int = 0,
) -> Tensor:
    """The slice of a global tensor's initial value, drawn on the CPU in float32.

    Args:
        name: global canonical name.
        global_shape: shape of the whole tensor.
        slices: one slice a dim: the part wanted.
        init: the distribution.
        seed: seed of the model.
        init_dim: the dim whose indices are seeded one by one.

    >>> whole = (slice(0, 4), slice(0, 6))
    >>> part = (slice(2, 4), slice(1, 3))
    >>> draw = dict(name="w", global_shape=(4, 6), init=Init.normal(1.0), seed=0)
    >>> bool((initial_shard(slices=whole, **draw)[2:4, 1:3] == initial_shard(slices=part, **draw)).all())
    True
    """
    shape = tuple(part.stop - part.start for part in slices)
    if init.kind == "constant":
        return torch.full(shape, init.value, dtype=torch.float32)
    within = slices[:init_dim] + slices[init_dim + 1 :]
    out = np.empty((shape[init_dim], *(part.stop - part.start for part in within)), dtype=np.float32)
    rows = _Rows(
        key_of=lambda place: name_key(seed, name, slices[init_dim].start + place),
        shape=global_shape[:init_dim] + global_shape[init_dim + 1 :],
        within=within,
    )
    workers = min(torch.get_num_threads(), -(-out.size // _THREAD_ELEMENTS))
    if workers <= 1:
        rows.draw(out, range(len(out)))
    else:  # each row has a generator of its own, so the threads' order changes nothing
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(partial(rows.draw, out), (range(n, len(out), workers) for n in range(workers))))
    return torch.from_numpy(out).mul_(init.value).movedim(0, init_dim).contiguous()
