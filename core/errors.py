"""The one family of exceptions, and the collector that reports every broken rule at once.

A message reads `<rule broken>: <name>=<value> …; <arithmetic>. <fix>.` with names as the user typed them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class IsozymeError(Exception):
    """Root of every error that isozyme raises on purpose."""


class ConfigError(IsozymeError, ValueError):
    """A configuration breaks a rule; nothing has been started yet."""


class DataError(IsozymeError, ValueError):
    """An input file is not what it must be; the message names file, record and line."""


class BackendError(IsozymeError, RuntimeError):
    """A backend that was asked for by name cannot run here; the message lists every unmet condition."""


class CommunicationError(IsozymeError, RuntimeError):
    """Ranks disagree about a collective, or a peer is gone; the message names ranks and calls."""


class CheckpointError(IsozymeError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or belongs to another model."""


class NonFiniteError(IsozymeError, ArithmeticError):
    """The loss or a gradient is NaN or infinite; raised on all ranks alike, before the optimiser step."""


class UsageError(IsozymeError, RuntimeError):
    """Calls came in an order that their contract forbids, such as reducing the same gradients twice."""


class Rules:
    """Collects broken rules, so that one `ConfigError` reports them all.

    >>> rules = Rules("layout")
    >>> rules.check(10 % 4 == 0, "ep must divide num_experts: num_experts=10, ep=4. Choose from 1, 2, 5, 10.")
    False
    >>> rules.raise_if_broken()
    Traceback (most recent call last):
    ...
    isozyme.core.errors.ConfigError: layout: 1 rule broken
      - ep must divide num_experts: num_experts=10, ep=4. Choose from 1, 2, 5, 10.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.broken: list[str] = []

    def check(self, holds: bool, message: str) -> bool:
        """Record `message` unless `holds`; returns `holds`, so that dependent checks can be skipped."""
        if not holds:
            self.broken.append(message)
        return holds

    def extend(self, messages: Iterable[str]) -> None:
        """Record rules found broken elsewhere."""
        self.broken.extend(messages)

    def raise_if_broken(self) -> None:
        """Raise one `ConfigError` that lists every broken rule, if there is any."""
        if self.broken:
            count = len(self.broken)
            head = f"{self.subject}: {count} rule{'s' if count > 1 else ''} broken"
            raise ConfigError("\n  - ".join([head, *self.broken]))


def divisors(number: int) -> list[int]:
    """The divisors of a positive number in ascending order: the legal values of many a setting."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about a misspelt word: the nearest known one, or all of them.

    >>> did_you_mean("tpok", ["topk", "num_experts"])
    "Did you mean 'topk'?"
    >>> did_you_mean("zzz", ["b", "a"])
    'Choose from a, b.'
    """
    options = sorted(known)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    return f"Did you mean '{near[0]}'?" if near else f"Choose from {', '.join(options)}."
