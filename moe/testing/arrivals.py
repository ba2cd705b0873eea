"""Claims about what arrives at the experts, each as a plain function that raises `Violation` where it fails.

Each takes what was given and what was seen; none knows the dispatcher. The names are those of `CLAIMS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from isozyme.moe.testing.inputs import Inputs
from isozyme.moe.testing.observe import Run, Seen
from isozyme.moe.testing.oracle import expected_arrivals
from isozyme.moe.testing.violation import Violation
from isozyme.moe.testing.world import World

Row = tuple[float, ...]


def every_row_was_sent(world: World, run: Run) -> None:
    """Provenance: an arrived row equals, bit for bit, a token of a rank of the same group."""
    for rank, seen in enumerate(run.seen):
        known = rows_by_value(world, run.inputs, rank)
        for expert, place, row in real_rows(seen):
            if row not in known:
                where = f"row {place} under expert {global_expert(world, rank, expert)} on rank {rank}"
                raise Violation(
                    "every_row_was_sent", f"{where} holds {list(row)}, which no rank of its group sent"
                )


def rows_stand_under_their_expert(world: World, run: Run) -> None:
    """Exclusivity: no expert sees a token that did not choose it."""
    for rank, seen in enumerate(run.seen):
        known = rows_by_value(world, run.inputs, rank)
        for expert, place, row in real_rows(seen):
            number = global_expert(world, rank, expert)
            if not any(number in experts for _, experts in known[row]):
                (source, token), experts = known[row][0]
                raise Violation(
                    "rows_stand_under_their_expert",
                    f"row {place} under expert {number} on rank {rank} is token {token} of rank {source}, "
                    f"which chose {_listed(experts)}",
                )


def every_kept_slot_arrives_once(world: World, run: Run) -> None:
    """Conservation: nothing is lost, and nothing comes twice."""
    for rank, seen in enumerate(run.seen):
        for expert, slots in enumerate(expected_arrivals(world, run.inputs, rank)):
            number = global_expert(world, rank, expert)
            wanted = Counter(row_of(run.inputs[r].tokens[t]) for r, t, _ in slots)
            came = Counter(row for at, _, row in real_rows(seen) if at == expert)
            for source, token, _ in slots:
                row = row_of(run.inputs[source].tokens[token])
                if came[row] != wanted[row]:
                    raise Violation(
                        "every_kept_slot_arrives_once",
                        f"token {token} of rank {source} must come {_times(wanted[row])} to expert {number} "
                        f"on rank {rank}, but came {_times(came[row])}",
                    )
            extra = came - wanted
            if extra:
                raise Violation(
                    "every_kept_slot_arrives_once",
                    f"expert {number} on rank {rank} got {list(next(iter(extra)))}, which nobody sent to it",
                )


def weights_travel_with_their_rows(world: World, run: Run) -> None:
    """The combine weight beside a row is that of the slot that the row comes from."""
    for rank, seen in enumerate(run.seen):
        if seen.probs is None:
            continue
        per_expert = seen.probs.split(seen.counts)
        for expert, slots in enumerate(expected_arrivals(world, run.inputs, rank)):
            wanted = Counter(
                (row_of(run.inputs[r].tokens[t]), float(run.inputs[r].weights[t, k])) for r, t, k in slots
            )
            came = [(row, float(per_expert[expert][at])) for of, at, row in real_rows(seen) if of == expert]
            for row, weight in came:
                if wanted[row, weight] == 0:
                    source, token = rows_by_value(world, run.inputs, rank)[row][0][0]
                    where = f"under expert {global_expert(world, rank, expert)} on rank {rank}"
                    right = next((w for r, w in wanted if r == row), 0.0)
                    raise Violation(
                        "weights_travel_with_their_rows",
                        f"token {token} of rank {source} stands {where} with weight {weight:.6g}, not "
                        f"{right:.6g}{_owner_of_weight(run.inputs, weight)}",
                    )
                wanted[row, weight] -= 1


def rows_are_in_order(world: World, run: Run) -> None:
    """Stability: within an expert by source rank, then token."""
    for rank, seen in enumerate(run.seen):
        for expert, slots in enumerate(expected_arrivals(world, run.inputs, rank)):
            wanted = [row_of(run.inputs[r].tokens[t]) for r, t, _ in slots]
            came = [row for of, _, row in real_rows(seen) if of == expert]
            if came != wanted:
                where = f"under expert {global_expert(world, rank, expert)} on rank {rank}"
                raise Violation(
                    "rows_are_in_order", f"rows {where} are not in the order of source rank, then token"
                )


def filler_weighs_nothing(world: World, run: Run, *, allowed: bool) -> None:
    """Rows that are all zeros stand for no slot: they are promised, or there are none, and weigh nothing."""
    for rank, seen in enumerate(run.seen):
        for expert, rows in enumerate(seen.by_expert()):
            empty = (rows == 0).all(dim=1)
            where = f"under expert {global_expert(world, rank, expert)} on rank {rank}"
            if empty.any() and not allowed:
                raise Violation("filler_weighs_nothing", f"a row {where} is all zeros: no rank sent it")
            if seen.probs is not None and (seen.probs.split(seen.counts)[expert][empty] != 0).any():
                raise Violation("filler_weighs_nothing", f"a row of zeros {where} has a weight other than 0")


def rows_by_value(
    world: World, inputs: Sequence[Inputs], rank: int
) -> dict[Row, list[tuple[tuple[int, int], tuple[int, ...]]]]:
    """For each row value in the group of a rank: the (rank, token) that have it, and their kept experts."""
    known: dict[Row, list[tuple[tuple[int, int], tuple[int, ...]]]] = {}
    for source in world.topology.group(rank, ("etp", "ep")):
        given = inputs[source]
        for token, (values, ids, kept) in enumerate(
            zip(given.tokens.tolist(), given.ids.tolist(), given.kept.tolist(), strict=True)
        ):
            experts = tuple(e for e, is_kept in zip(ids, kept, strict=True) if is_kept)
            known.setdefault(tuple(values), []).append(((source, token), experts))
    return known


def real_rows(seen: Seen) -> list[tuple[int, int, Row]]:
    """(local expert, place within the expert, values) of each row that is not filler."""
    return [
        (expert, place, tuple(row))
        for expert, rows in enumerate(seen.by_expert())
        for place, row in enumerate(rows.tolist())
        if any(row)
    ]


def global_expert(world: World, rank: int, expert: int) -> int:
    topology = world.topology
    return topology.index(rank, "ep") * (world.num_experts // topology.size("ep")) + expert


def row_of(values: Tensor) -> Row:
    return tuple(values.tolist())


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _listed(experts: Sequence[int]) -> str:
    return f"expert {', '.join(map(str, experts))}" if experts else "no expert (its slots are dropped)"


def _owner_of_weight(inputs: Sequence[Inputs], weight: float) -> str:
    for rank, given in enumerate(inputs):
        for token, choice in (given.weights == weight).nonzero().tolist()[:1]:
            return f": that is the weight of choice {choice} of token {token} of rank {rank}"
    return ""
