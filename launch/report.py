"""The table that closes a run: what was learned, how fast, how evenly the experts worked, and what ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Int
from rich.table import Table
from torch import Tensor

from isozyme.core.genome.markov import MarkovScore
from isozyme.launch.evaluate import Evaluation


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The outcome of a run."""

    name: str
    steps: int
    ranks: int
    layout: str
    loss: float | None
    """Training loss of the last step, nats; None if no step was made."""
    evaluation: Evaluation
    markov: MarkovScore
    tokens_per_s: float
    """Real tokens a second over all ranks: the median of the steps; 0 if no step was made."""
    routed: Int[Tensor, "L E"]
    """Slots that chose each expert in the steps of this process, before capacity."""
    dropped: int
    """Slots that capacity dropped in these steps."""
    memory_bytes: int
    """Peak memory of rank 0."""
    choices: Mapping[str, str] = field(default_factory=dict)
    """What runs, and why: experts, dispatcher, attention, optimiser, device."""


def closing_table(summary: Summary) -> Table:
    """The summary as a table of two columns."""
    ranks = count(summary.ranks, "rank")
    title = f"{summary.name}: {count(summary.steps, 'step')}, {ranks} ({summary.layout})"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    held_out, markov = summary.evaluation.bits_per_base, summary.markov
    difference = markov.bits_per_base - held_out
    verdict = f"{abs(difference):.4f} {'below' if difference >= 0 else 'above'} the baseline"
    if summary.loss is not None:
        table.add_row("training loss", f"{summary.loss:.4f} nats a base (last step)")
    table.add_row(
        "held-out", f"{held_out:.4f} bits per base over {summary.evaluation.labels:,} bases, {verdict}"
    )
    table.add_row("Markov baseline", f"{markov.bits_per_base:.4f} bits per base (order {markov.order})")
    if summary.tokens_per_s:
        table.add_row("speed", f"{summary.tokens_per_s:,.0f} tokens/s ({ranks})")
    for layer, line in enumerate(load_lines(summary.routed)):
        table.add_row(f"expert load, MoE layer {layer}", line)
    slots = int(summary.routed.sum())
    if slots:
        share = 100 * summary.dropped / slots
        table.add_row("dropped slots", f"{summary.dropped:,} of {slots:,} ({share:.2f} %)")
    table.add_row("peak memory", f"{summary.memory_bytes / 2**20:,.0f} MiB (rank 0)")
    for what, why in summary.choices.items():
        table.add_row(what, why)
    return table


def grouped_choices(by_layer: Mapping[str, str]) -> dict[str, str]:
    """What every layer runs, said once for all layers that agree.

    >>> grouped_choices({"layers.0.moe.experts": "loop", "layers.1.moe.experts": "loop"})
    {'experts': 'loop'}
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, words in by_layer.items():
        layer, part = name.removeprefix("layers.").split(".", 1)[0], name.rsplit(".", 1)[-1]
        found.setdefault(part, {}).setdefault(words, []).append(layer)
    return {
        part: next(iter(said))
        if len(said) == 1
        else "; ".join(f"{words} (layers {', '.join(layers)})" for words, layers in said.items())
        for part, said in found.items()
    }


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "rank"), count(1200, "rank")
    ('1 rank', '1,200 ranks')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def load_lines(routed: Int[Tensor, "L E"]) -> list[str]:
    """For each layer the least, the mean and the largest share of its slots that an expert got.

    >>> import torch
    >>> load_lines(torch.tensor([[1, 3]]))
    ['min 25.0 %, mean 50.0 %, max 75.0 %']
    """
    lines = []
    for layer in routed.double():
        part = 100 * layer / layer.sum().clamp(min=1)
        low, mean, high = (float(x) for x in (part.min(), part.mean(), part.max()))
        lines.append(f"min {low:.1f} %, mean {mean:.1f} %, max {high:.1f} %")
    return lines
