"""Measured times of expert backends, by which `auto` chooses: one JSON file a GPU in the folder measured_on.

The files are made from the results of `isozyme bench layer` by `isozyme bench report --auto-table`; nothing
in them is written by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch

from isozyme.core.errors import DataError

SCHEMA = "isozyme.measured/1"
NOMINAL_ROWS = 32_768
"""Rows that a rank's experts are taken to get when a backend is chosen: the number is not known then.

16,384 tokens of two experts each. It only weighs between shapes that were measured with different rows.
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides about the speed of one rank's experts."""

    hidden: int
    ffn: int
    num_local_experts: int
    rows: int = NOMINAL_ROWS
    """Rows of all local experts together."""

    def distance(self, other: Shape) -> float:
        """How far two shapes are apart: the Euclidean distance of the sizes' binary logarithms.

        >>> Shape(hidden=1024, ffn=64, num_local_experts=8).distance(
        ...     Shape(hidden=1024, ffn=256, num_local_experts=8)
        ... )
        2.0
        """
        own, others = asdict(self).values(), asdict(other).values()
        return math.dist([math.log2(size) for size in own], [math.log2(size) for size in others])

    def __str__(self) -> str:
        return f"h={self.hidden} f={self.ffn} E={self.num_local_experts} rows={self.rows:,}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Milliseconds of forward and backward of one layer's experts, by backend."""

    precision: str
    shape: Shape
    ms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """All measurements on one kind of GPU."""

    gpu: str
    """Its name, as `torch.cuda.get_device_name` gives it."""
    measurements: tuple[Measurement, ...]

    def nearest(self, precision: str, shape: Shape) -> Measurement | None:
        """The measurement in this precision whose shape is nearest; None if there is none in it."""
        fitting = [each for each in self.measurements if each.precision == precision]
        return min(fitting, key=lambda each: each.shape.distance(shape), default=None)


def measured_on(device: torch.device) -> MeasuredTable | None:
    """The measurements on this device's kind of GPU; None if there are none (as on every CPU)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    return next((table for table in shipped_tables() if table.gpu == name), None)


def shipped_tables() -> Iterator[MeasuredTable]:
    """The tables that come with the package."""
    folder = files("isozyme.moe.experts") / "measured_on"
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.name.endswith(".json"):
            yield table_from(_read(entry), entry.name)


def _read(entry: Traversable) -> Any:
    try:
        return json.loads(entry.read_text())
    except ValueError as error:
        raise DataError(f"a table of measured backends is JSON: {entry} is not: {error}.") from error


def table_from(document: Any, where: str | Path) -> MeasuredTable:
    """A table from the JSON of its file.

    Raises:
        DataError: if the document is none.
    """
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        raise DataError(f"a table of measured backends has schema={SCHEMA}: {where} has not.")
    sizes = ("hidden", "ffn", "num_local_experts", "rows")
    try:
        return MeasuredTable(
            gpu=document["gpu"],
            measurements=tuple(
                Measurement(
                    precision=row["precision"],
                    shape=Shape(**{size: int(row[size]) for size in sizes}),
                    ms={name: float(ms) for name, ms in row["ms"].items()},
                )
                for row in document["measurements"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"a table of measured backends is written by isozyme bench report --auto-table: {where} is not "
            f"complete ({type(error).__name__}: {error}). Make it anew."
        ) from error
