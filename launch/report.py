"""The table that closes a run: what was learned, how fast, how evenly the experts worked, and what ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Int
from rich.console import Console
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
    """Real tokens a second over all ranks: the median of the steps."""
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
    table = Table(title=f"{summary.name}: {summary.steps} steps, {summary.ranks} ranks ({summary.layout})")
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    held_out, markov = summary.evaluation.bits_per_base, summary.markov
    difference = markov.bits_per_base - held_out
    verdict = f"{abs(difference):.4f} {'below' if difference >= 0 else 'above'} the baseline"
    if summary.loss is not None:
        table.add_row("training loss", f"{summary.loss:.4f} nats a base (last step)")
    table.add_row(
        "held-out", f"{held_out:.4f} bits per base over {summary.evaluation.labels:,} bases, {verdict}"
    )
    table.add_row("Markov baseline", f"{markov.bits_per_base:.4f} bits per base (order {markov.order})")
    table.add_row("speed", f"{summary.tokens_per_s:,.0f} tokens/s ({summary.ranks} ranks together)")
    for layer, line in enumerate(load_lines(summary.routed)):
        table.add_row(f"expert load, MoE layer {layer}", line)
    slots = int(summary.routed.sum())
    share = 100 * summary.dropped / slots if slots else 0.0
    table.add_row("dropped slots", f"{summary.dropped:,} of {slots:,} ({share:.2f} %)")
    table.add_row("peak memory", f"{summary.memory_bytes / 2**20:,.0f} MiB (rank 0)")
    for what, why in summary.choices.items():
        table.add_row(what, why)
    return table


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


def print_table(summary: Summary, console: Console) -> None:
    """Print the closing table; outside a terminal at a width that keeps lines whole."""
    if console.is_terminal:
        console.print(closing_table(summary))
    else:
        console.print(closing_table(summary), width=120)
