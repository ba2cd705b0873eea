"""Benchmarks as tables: for the terminal, and as markdown merged from several JSON files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


def _number(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(key)
        return "–" if value is None else format(value * scale, form)

    return show


def _spread(low: str, high: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        return "–" if row.get(low) is None else f"{row[low]:.2f}–{row[high]:.2f}"

    return show


def _count(key: str) -> Callable[[Row], str]:
    return lambda row: "–" if row.get(key) is None else str(row[key])


def _implementation(row: Row) -> str:
    settings = "".join(f" + {each}" for each in row.get("contender_settings", ()))
    return f"{row['name']}{' (peer)' if row['kind'] == 'peer' else ''}{settings}"


def _optimiser(row: Row) -> str:
    """Its kernel, without the reasons why not another."""
    words = str(row.get("choices", {}).get("optimiser", "–")).split("; ")[0]
    return words + ")" * (words.count("(") - words.count(")"))


_LAYER: tuple[Column, ...] = (
    ("implementation", _implementation),
    ("precision", lambda row: str(row["precision"])),
    ("ms", _number("ms", ".2f")),
    ("low–high", _spread("ms_low", "ms_high")),
    ("TFLOP/s", _number("tflops", ",.1f")),
    ("tokens/s", _number("tokens_per_s", ",.0f")),
    ("saved B/token", _number("saved_bytes_per_token", ",.0f")),
    ("over bound", _number("saved_over_bound", ".2f")),
    ("held MiB", _number("held_bytes", ",.0f", 2**-20)),
    ("peak MiB", _number("peak_bytes", ",.0f", 2**-20)),
    ("kernels", _count("launches")),
    ("waits", _count("host_syncs")),
    ("worst error", _number("worst_error", ".1e")),
)
_ABLATION: tuple[Column, ...] = (*_LAYER[:4], ("gain", _number("gain", ".2f")), *_LAYER[4:])
_TRAIN: tuple[Column, ...] = (
    _LAYER[0],
    _LAYER[1],
    ("tokens/s/GPU", _number("tokens_per_s_per_gpu", ",.0f")),
    ("TFLOP/s/GPU", _number("tflops_per_gpu", ",.1f")),
    ("MFU %", _number("mfu", ".1f", 100)),
    ("of measured GEMM %", _number("share_of_measured_gemm", ".1f", 100)),
    ("step ms", _number("step_ms", ",.1f")),
    ("low–high", _spread("step_ms_low", "step_ms_high")),
    ("peak GiB", _number("peak_bytes", ",.1f", 2**-30)),
    ("optimiser", _optimiser),
    ("loss", lambda row: f"{row['first_loss']:.3f} → {row['last_loss']:.3f}" if "first_loss" in row else "–"),
)
_LAYOUTS: tuple[Column, ...] = (
    ("layout", lambda row: str(row["name"])),
    _LAYER[1],
    ("GPUs", _count("ranks")),
    ("tokens/s", _number("tokens_per_s", ",.0f")),
    _TRAIN[2],
    _TRAIN[6],
    _TRAIN[7],
    ("peak GiB of rank 0", _number("peak_bytes", ",.2f", 2**-30)),
    _TRAIN[10],
    ("largest difference %", _number("difference", ".3f", 100)),
)


def columns_of(kind: str) -> tuple[Column, ...]:
    """The columns of a kind of document."""
    return {"train": _TRAIN, "layouts": _LAYOUTS, "ablation": _ABLATION}.get(kind, _LAYER)


def _is_ok(row: Row) -> bool:
    return row.get("status") == "ok"


def terminal_tables(document: Mapping[str, Any]) -> list[Table]:
    """One table for each case of a document."""
    tables = []
    for title, rows in _cases(document):
        table = Table(title=title, title_justify="left")
        columns = columns_of(document["kind"])
        for place, (header, _) in enumerate(columns):
            table.add_column(header, justify="left" if place < 2 else "right", overflow="fold")
        for row in filter(_is_ok, rows):
            table.add_row(*(show(row) for _, show in columns))
        notes = [_note(row) for row in rows if not _is_ok(row)]
        if notes:
            table.caption, table.caption_justify = "\n".join(notes), "left"
        tables.append(table)
    return tables


def markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """Several documents as one markdown text: for each the machine, the command, and its tables.

    A row that could not be measured is written below its table, with the reason.
    """
    parts = []
    for document in documents:
        parts.append(f"## {document['kind']}: {_machine(document)}")
        parts.append(f"{document['date']}; {_versions(document)}")
        parts += [f"```\n{document['command']}\n```", *_ceilings(document)]
        columns = columns_of(document["kind"])
        for title, rows in _cases(document):
            lines = [f"| {' | '.join(header for header, _ in columns)} |"]
            lines.append(f"|{'|'.join('---' if place < 2 else '---:' for place in range(len(columns)))}|")
            lines += [f"| {' | '.join(show(row) for _, show in columns)} |" for row in filter(_is_ok, rows)]
            parts += [f"### {title}", "\n".join(lines)]
            notes = [f"- {_note(row)}" for row in rows if not _is_ok(row)]
            if notes:
                parts.append("\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _cases(document: Mapping[str, Any]) -> list[tuple[str, list[Row]]]:
    """Rows that belong in one table, with its title."""
    settings = document["settings"]
    if document["kind"] == "layouts":
        return [(f"{settings['workload']}, {settings['steps']} steps", list(document["rows"]))]
    if document["kind"] == "train":
        return [(f"{settings['workload']}, {settings['gpus']} ranks", list(document["rows"]))]
    ceilings = {
        (case["shape"]["name"], case["routing"]): case["grouped_gemm_tflops"] for case in document["cases"]
    }

    def key(row: Row) -> tuple[str, int, str, str]:
        return row["shape"], row["tokens"], row["routing"], row.get("table", "")

    tables = []
    for (shape, tokens, routing, name), rows in groupby(document["rows"], key):
        ceiling = ceilings.get((shape, routing))
        alone = "" if ceiling is None else f"; grouped GEMMs alone {ceiling:,.1f} TFLOP/s"
        head = f"{name}: " if name else ""
        tables.append((f"{head}{shape}, {tokens:,} tokens, {routing}{alone}", list(rows)))
    return tables


def _note(row: Row) -> str:
    return f"{row['name']} {row['precision']}: {row.get('status', '?')}: {row.get('reason', '')}"


def _machine(document: Mapping[str, Any]) -> str:
    hardware = document["hardware"]
    if hardware["gpu"] is None:
        return f"CPU ({hardware['cpu']}, {hardware['cpu_cores']} cores)"
    return f"{hardware['gpus']} × {hardware['gpu']}, driver {hardware['driver']}"


def _versions(document: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)


def _ceilings(document: Mapping[str, Any]) -> list[str]:
    ceilings = document["ceilings"]
    if not ceilings:
        return []
    gemm, copy = ceilings["gemm_tflops"], ceilings["copy_tbytes"]
    return [f"Measured in the same run: large GEMM {gemm:,.1f} TFLOP/s, device copy {copy:.2f} TB/s."]
