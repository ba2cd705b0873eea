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


def measured_table(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the balanced cases of layer benchmarks say about our backends; other rows and kinds are left out.

    Where the same backend, precision and shape was measured twice, the later document counts.

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
    times: dict[tuple[str, int, int, int, int], dict[str, float]] = {}
    for document in layers:
        shapes = {case["shape"]["name"]: case["shape"] for case in document["cases"]}
        for row in document["rows"]:
            if row["kind"] == "isozyme" and row["status"] == "ok" and row["routing"] == ROUTING:
                size = shapes[row["shape"]]
                rows = row["tokens"] * size["topk"]
                key = (row["precision"], size["hidden"], size["ffn"], size["num_experts"], rows)
                times.setdefault(key, {})[row["name"]] = round(row["ms"], 3)
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


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write the table as JSON."""
    path.write_text(json.dumps(table, indent=1) + "\n")
