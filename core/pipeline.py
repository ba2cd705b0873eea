"""How a pipeline is configured, and which layers each of its virtual stages holds: pure integer arithmetic.

With `pp` stages and `chunks` chunks on each, the layers are cut into `pp * chunks` contiguous parts, the
virtual stages. Virtual stage v lies on stage `v % pp` as that stage's chunk `v // pp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from isozyme.core.errors import Rules

ScheduleKind = Literal["1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """In which order a pipeline stage works through the micro-batches, and how the layers are cut.

    Where `layout.pp` is 1 the model is one chunk and this section changes nothing, so that a configuration
    written for a pipeline also runs on one rank.
    """

    schedule: ScheduleKind = "1f1b"
    chunks: int = 1
    """Virtual stages on each stage; more than one for `interleaved` only."""
    split: tuple[int, ...] | None = None
    """Layers of each virtual stage, from the embedding to the head; as equal as can be if null."""

    def num_chunks(self, stages: int) -> int:
        """The chunks that each of `stages` stages holds."""
        return self.chunks if stages > 1 else 1

    def layers(self, num_layers: int, stages: int) -> list[range]:
        """The layers of each virtual stage, from the embedding to the head."""
        parts = stages * self.num_chunks(stages)
        sizes = even_split(num_layers, parts) if self.split is None or stages == 1 else self.split
        stops = list(accumulate(sizes))
        return [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]

    def problems(
        self, *, stages: int, num_layers: int, micro_batches: int | None = None, where: str = "pipeline"
    ) -> list[str]:
        """Every broken rule in words.

        Args:
            stages: `layout.pp`.
            num_layers: layers of the model.
            micro_batches: micro-batches of one rank in one step; None if they are not known.
            where: the name of this section.
        """
        rules = Rules(where)
        chunks = self.chunks
        if not rules.check(
            chunks >= 1, f"{where}.chunks must be at least 1: {where}.chunks={chunks}. Use 1."
        ):
            return rules.broken
        rules.check(
            chunks == 1 or self.schedule == "interleaved",
            f"several chunks a stage need the interleaved schedule: {where}.schedule={self.schedule}, "
            f"{where}.chunks={chunks}. Use {where}.schedule=interleaved, or {where}.chunks=1.",
        )
        if stages < 2:
            return rules.broken
        rules.extend(self._split_problems(stages, num_layers, where))
        if self.schedule == "interleaved" and micro_batches is not None:
            rules.check(
                micro_batches % stages == 0,
                "the micro-batches of a step must be a multiple of pp in the interleaved schedule: "
                f"train.global_batch / (dp * train.micro_batch)={micro_batches}, layout.pp={stages}; "
                f"{micro_batches} % {stages} = {micro_batches % stages}. "
                f"The nearest is {max(1, round(micro_batches / stages)) * stages}.",
            )
        return rules.broken

    def _split_problems(self, stages: int, num_layers: int, where: str) -> list[str]:
        rules = Rules(where)
        parts = stages * self.chunks
        if self.split is None:
            fits = [c for c in range(1, self.chunks + 1) if c * stages <= num_layers]
            rules.check(
                parts <= num_layers,
                f"every virtual stage needs a layer: layout.pp={stages}, {where}.chunks={self.chunks} make "
                f"{parts} virtual stages of model.num_layers={num_layers} layers. "
                + (f"Lower {where}.chunks to {fits[-1]}." if fits else f"Lower layout.pp to {num_layers}."),
            )
            return rules.broken
        split = list(self.split)
        example = even_split(num_layers, parts) if parts <= num_layers else None
        advice = "Leave it null." if example is None else f"For instance {list(example)}, or null."
        rules.check(
            len(split) == parts,
            f"a split has one number for each virtual stage: {where}.split={split} has {len(split)}, "
            f"layout.pp={stages} * {where}.chunks={self.chunks} = {parts}. {advice}",
        )
        rules.check(
            sum(split) == num_layers,
            f"a split must name every layer once: {where}.split={split} adds up to {sum(split)}, "
            f"model.num_layers={num_layers}. {advice}",
        )
        rules.check(
            all(size >= 1 for size in split[1:-1]) and all(size >= 0 for size in split),
            "every virtual stage needs a layer, but the first (embedding) and the last (head) may have none: "
            f"{where}.split={split}. {advice}",
        )
        return rules.broken


def even_split(num_layers: int, parts: int) -> Sequence[int]:
    """Sizes of `parts` contiguous parts that differ by at most one; the larger parts come last.

    Early stages hold the activations of more micro-batches than late ones, so an extra layer costs least
    memory at the end.

    >>> even_split(7, 3)
    (2, 2, 3)
    """
    size, rest = divmod(num_layers, parts)
    return tuple(size + (part >= parts - rest) for part in range(parts))
