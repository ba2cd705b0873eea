"""The strict conversion of a plain tree to the dataclasses of `isozyme.core.config`.

Every unknown key, wrong type and illegal value is collected with its full dotted path and its origin; a bad
value is replaced by its default, so that the rules of the rest can be checked in the same pass.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from isozyme.core.config import RunConfig
from isozyme.core.errors import Rules, did_you_mean


@dataclass(frozen=True)
class Origin:
    """Where a value was given: a file with its line, or an override (with the text as typed)."""

    where: str
    raw: str | None = None


class _Illegal(Exception):
    """A value does not fit its type; the message says what was expected."""


def convert_run(tree: Mapping[str, Any], origins: Mapping[str, Origin], rules: Rules) -> RunConfig:
    """Build the configuration and record in `rules` everything that is wrong with it.

    Args:
        tree: nested plain values, interpolations resolved.
        origins: dotted key → where it was given; keys without one are defaults.
        rules: receives the broken rules; nothing is raised here.
    """
    converter = _Converter(origins, rules)
    config = converter.section(RunConfig, tree, "")
    assert isinstance(config, RunConfig)
    rules.extend(problem for problem in config.problems() if not _mentions(problem, converter.failed))
    return config


def known_keys(cls: type[Any] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, sections excluded."""
    for name, hint in _hints(cls).items():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from known_keys(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


class _Converter:
    def __init__(self, origins: Mapping[str, Origin], rules: Rules) -> None:
        self.origins = origins
        self.rules = rules
        self.failed: set[str] = set()

    def section(self, cls: type[Any], tree: Any, path: str) -> Any:
        """One dataclass from one mapping; `path` is empty or ends in a dot."""
        if not isinstance(tree, Mapping):
            name = path.rstrip(".")
            self._record(name, f"{name} is a section, not a value: {name}={_show(tree)}{self._from(name)}. "
                         f"Set one of its keys: {', '.join(_hints(cls))}.")  # fmt: skip
            return cls()
        hints = _hints(cls)
        given: dict[str, Any] = {}
        for key, value in tree.items():
            dotted = f"{path}{key}"
            if key not in hints:
                self._record(dotted, self._unknown(str(key), path, hints))
            elif is_dataclass(hints[key]):
                given[key] = self.section(hints[key], value, f"{dotted}.")
            else:
                try:
                    given[key] = _fit(hints[key], value, self._raw(dotted))
                except _Illegal as illegal:
                    shown = f"{dotted}={_show(value)}{self._from(dotted)}"
                    self._record(dotted, f"{dotted} must be {illegal.args[0]}: {shown}.{illegal.args[1]}")
        return cls(**given)

    def _unknown(self, key: str, path: str, hints: Mapping[str, Any]) -> str:
        """The message for a key that does not exist: the nearest sibling, else the same word elsewhere."""
        elsewhere = [known for known in known_keys() if known.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
        hint = did_you_mean(key, hints)
        if not hint.startswith("Did you mean") and elsewhere:
            hint = f"Did you mean {' or '.join(elsewhere)}?"
        elif hint.startswith("Did you mean") and path:
            hint = hint.replace("'", f"'{path}", 1)
        return f"unknown key: {path}{key}{self._from(path + key)}. {hint}"

    def _from(self, dotted: str) -> str:
        while dotted:
            matches = [key for key in self.origins if key == dotted or key.startswith(f"{dotted}.")]
            if matches:
                return f" ({self.origins[matches[-1]].where})"
            dotted = dotted.rpartition(".")[0]
        return ""

    def _raw(self, dotted: str) -> str | None:
        origin = self.origins.get(dotted)
        return origin.raw if origin is not None else None

    def _record(self, dotted: str, message: str) -> None:
        self.failed.add(dotted)
        self.rules.check(False, message)


def _fit(hint: Any, value: Any, raw: str | None) -> Any:
    """`value` as the type `hint`; raises `_Illegal(expected, advice)` if it does not fit."""
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        if value is None:
            return None
        assert len(options) == 1, hint
        try:
            return _fit(options[0], value, raw)
        except _Illegal as illegal:
            raise _Illegal(f"{illegal.args[0]} or null", illegal.args[1]) from None
    if get_origin(hint) is Literal:
        legal = get_args(hint)
        word = raw if raw in legal else value
        if word in legal and not isinstance(word, bool):
            return word
        raise _Illegal(f"one of {', '.join(map(str, legal))}", _nearest(value, legal))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        counted = f"{len(parts)} "
        if parts[-1] is Ellipsis:
            counted, parts = "", (parts[0],) * (len(value) if isinstance(value, (list, tuple)) else 1)
        if not isinstance(value, (list, tuple)) or len(value) != len(parts):
            raise _Illegal(f"a list of {counted}{_NAMES[parts[0]][1]}", "")
        return tuple(_fit(part, item, None) for part, item in zip(parts, value, strict=True))
    return _fit_scalar(hint, value, raw)


_NAMES = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "truth values"),
    str: ("text", "texts"),
}


def _fit_scalar(hint: Any, value: Any, raw: str | None) -> Any:
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    if hint is str and raw is not None and isinstance(value, (bool, int, float)) and "${" not in raw:
        return raw  # an override such as name=007 is text as typed, whatever YAML reads in it
    advice = ""
    if hint is int and isinstance(value, float) and value.is_integer():
        advice = f" Write {int(value)}."
    elif hint is str and isinstance(value, (bool, int, float)):
        advice = f" Put it in quotes: '{value}'."
    raise _Illegal(_NAMES[hint][0], advice)


def _nearest(value: Any, legal: tuple[Any, ...]) -> str:
    hint = did_you_mean(str(value), map(str, legal))
    return f" {hint}" if hint.startswith("Did you mean") else ""


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, str) else str(value)


def _mentions(problem: str, failed: set[str]) -> bool:
    """Whether a rule speaks of a value that was not understood (and so is a default that nobody chose)."""
    words = {dotted.rsplit(".", 1)[-1] for dotted in failed}
    return any(re.search(rf"\b{re.escape(word)}\b", problem) for word in words)


def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}
