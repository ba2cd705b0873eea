"""The table by which `auto` chooses an expert backend, made from the results of `isozyme bench layer`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isozyme.core.errors import DataError
from isozyme.moe.experts.measured import SCHEMA

ROUTING = "balanced"
"""The routing whose times count: what an expert gets in training is not known beforehand."""

_Key = tuple[str, int, int, int, int]
"""Precision, h, f, experts, rows."""


def measured_table(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the balanced cases of layer benchmarks say about our backends; other rows and kinds are left out.

    The times of one shape and precision are those of one document, as different runs do not compare: of that
    with the most backends, and among such of the latest.

    Args:
        documents: JSON of benchmarks, all of one kind of GPU.

    Raises:
        DataError: if there is nothing to make a table of, or the GPUs differ.
    """
    layers = sorted((each for each in documents if each["kind"] == "layer"), key=lambda each: each["date"])
    gpus = {each["hardware"]["gpu"] for each in layers}
    if len(gpus) != 1 or None in gpus:
        found = ", ".join(sorted(map(str, gpus))) or "none"
        raise DataError(
            f"a table of measured backends needs results of `bench layer` on one kind of GPU: GPUs={found}. "
            "Give the files of one."
        )
    times: dict[_Key, dict[str, float]] = {}
    for document in layers:
        for key, ms in _times(document).items():
            if len(ms) >= len(times.get(key, {})):
                times[key] = ms
    if not times:
        raise DataError(f"a table of measured backends needs rows with routing={ROUTING}: there are none.")
    return {
        "schema": SCHEMA,
        "gpu": gpus.pop(),
        "sources": [
            {"date": each["date"], "command": each["command"], "versions": each["versions"]}
            for each in layers
        ],
        "measurements": [
            {
                "precision": precision,
                "hidden": hidden,
                "ffn": ffn,
                "num_local_experts": experts,
                "rows": rows,
                "ms": dict(sorted(ms.items(), key=lambda item: item[1])),
            }
            for (precision, hidden, ffn, experts, rows), ms in sorted(times.items())
        ],
    }


def _times(document: Mapping[str, Any]) -> dict[_Key, dict[str, float]]:
    """Milliseconds by backend of each precision and shape of one document."""
    shapes = {case["shape"]["name"]: case["shape"] for case in document["cases"]}
    found: dict[_Key, dict[str, float]] = {}
    for row in document["rows"]:
        if row["kind"] == "isozyme" and row["status"] == "ok" and row["routing"] == ROUTING:
            size = shapes[row["shape"]]
            rows = row["tokens"] * size["topk"]
            key = (row["precision"], size["hidden"], size["ffn"], size["num_experts"], rows)
            found.setdefault(key, {})[row["name"]] = round(row["ms"], 3)
    return found


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write the table as JSON."""
    path.write_text(json.dumps(table, indent=1) + "\n")
