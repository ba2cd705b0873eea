"""Which simulated rank runs next, as data: a list of choices, a seed, or nothing for taking turns."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from isozyme.parallel.simulated_baton import Schedule

ScheduleData = tuple[int, ...] | int
"""Choices among the ranks that may run, one for each hand-over, then turns; or the seed of random choices."""


class _Choices:
    """Follows the list, and takes turns after its end."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._rest = list(reversed(choices))
        self._last = -1

    def __call__(self, ready: Sequence[int]) -> int:
        if self._rest:
            self._last = ready[self._rest.pop() % len(ready)]
        else:
            self._last = next((rank for rank in ready if rank > self._last), ready[0])
        return self._last


def schedule_from(data: ScheduleData) -> Schedule:
    """The schedule that the data describes, to be used for one run.

    >>> turns = schedule_from(())
    >>> [turns([0, 1, 2]) for _ in range(4)]
    [0, 1, 2, 0]
    >>> last_first = schedule_from((2, 1))
    >>> [last_first([0, 1, 2]) for _ in range(4)]
    [2, 1, 2, 0]
    """
    return random.Random(data).choice if isinstance(data, int) else _Choices(data)


LAST_FIRST: ScheduleData = (-1,) * 200
"""The highest rank runs whenever it can: the reverse of what most programs expect."""


def schedule_words(schedule: ScheduleData, delay: tuple[int, int] | None) -> list[str]:
    """The words of a world's line that say in which order things happen; none if the ranks take turns.

    >>> schedule_words((2, 0, 1), (1, 3)), schedule_words(7, None), schedule_words((), None)
    (['schedule=2.0.1', 'delay=1.3'], ['seed=7'], [])
    """
    words = []
    if isinstance(schedule, int):
        words.append(f"seed={schedule}")
    elif schedule:
        words.append(f"schedule={numbers_text(schedule)}")
    return words if delay is None else [*words, f"delay={numbers_text(delay)}"]


def read_schedule(words: Mapping[str, str]) -> tuple[ScheduleData, tuple[int, int] | None]:
    """Schedule and delay from the words of a line."""
    schedule = int(words["seed"]) if "seed" in words else read_numbers(words.get("schedule", ""))
    delay = read_numbers(words.get("delay", ""))
    return schedule, (delay[0], delay[1]) if delay else None


def numbers_text(numbers: Sequence[int]) -> str:
    """Numbers joined by dots."""
    return ".".join(map(str, numbers))


def read_numbers(text: str) -> tuple[int, ...]:
    """The numbers that `numbers_text` joined."""
    return tuple(int(number) for number in text.split(".")) if text else ()
