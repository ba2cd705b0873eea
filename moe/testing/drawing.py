"""A world and what went wrong in it, as plain text of at most 40 lines."""

from __future__ import annotations

from collections.abc import Sequence

from isozyme.moe.testing.arrivals import Row, real_rows, rows_by_value
from isozyme.moe.testing.compare import first_wrong
from isozyme.moe.testing.inputs import Inputs
from isozyme.moe.testing.observe import Run, Seen
from isozyme.moe.testing.oracle import Expected, expected_arrivals
from isozyme.moe.testing.world import Slot, World

MOST_LINES = 40
_WIDTH = 100


def picture(world: World, run: Run | None = None, expected: Expected | None = None) -> str:
    """Ranks, tokens and their experts; with a run, what arrived where, and who got whose result.

    `r1t0` is token 0 of rank 1. What is wrong is marked with `<--` and what it should have been.
    """
    lines = [_head(world), *_tokens(world)]
    if run is not None:
        lines += ["arrived", *_arrived(world, run)]
        if expected is not None:
            lines += ["returned", *_returned(world, run, expected)]
    if len(lines) > MOST_LINES:
        marked = [line for line in lines if "<--" in line]
        rest = [line for line in lines if "<--" not in line]
        lines = [*rest[: MOST_LINES - len(marked[:20]) - 1], *marked[:20], "… (cut to 40 lines)"]
    return "\n".join(lines)


def _head(world: World) -> str:
    schedule = "ranks take turns"
    if isinstance(world.schedule, int):
        schedule = f"schedule seed {world.schedule}"
    elif world.schedule:
        schedule = f"schedule {list(world.schedule)}, then turns"
    if world.delay is not None:
        schedule += f", rank {world.delay[0]} late at its call {world.delay[1]}"
    return (
        f"world: {_many(world.ranks, 'rank')} ({world.layout}), {_many(world.num_experts, 'expert')}, "
        f"top-{world.topk}, {world.dtype}, {world.memory}, {schedule}"
    )


def _tokens(world: World) -> list[str]:
    lines = []
    topology = world.topology
    local = world.num_experts // topology.size("ep")
    for rank, rows in enumerate(world.ids):
        first = topology.index(rank, "ep") * local
        held = ",".join(f"e{expert}" for expert in range(first, first + local))
        sent = [
            f"t{token}→{'+'.join(_choice(world, (rank, token, k), e) for k, e in enumerate(row))}"
            for token, row in enumerate(rows)
        ]
        lines.append(_cut(f"  rank {rank} holds {held} | sends {'  '.join(sent) or 'no token'}"))
    return lines


def _choice(world: World, slot: Slot, expert: int) -> str:
    if not world.is_kept(slot):
        return f"(e{expert} dropped)"
    return f"e{expert}(weight 0)" if slot in world.zero else f"e{expert}"


def _arrived(world: World, run: Run) -> list[str]:
    lines = []
    topology = world.topology
    local = world.num_experts // topology.size("ep")
    for rank, seen in enumerate(run.seen):
        known = rows_by_value(world, run.inputs, rank)
        for expert, slots in enumerate(expected_arrivals(world, run.inputs, rank)):
            came = [_name(known, row) for at, _, row in real_rows(seen) if at == expert]
            wanted = [_name(known, tuple(run.inputs[r].tokens[t].tolist())) for r, t, _ in slots]
            number = topology.index(rank, "ep") * local + expert
            line = f"  at e{number} on rank {rank}: {' '.join(came) or 'nothing'}"
            if sorted(came) != sorted(wanted):
                line += f"   <-- should be {' '.join(wanted) or 'nothing'}"
            elif _weights_differ(run.inputs, seen, expert, slots):
                line += "   <-- with weights of other slots"
            lines.append(_cut(line))
    return lines


def _weights_differ(inputs: Sequence[Inputs], seen: Seen, expert: int, slots: Sequence[Slot]) -> bool:
    if seen.probs is None:
        return False
    found = sorted(weight for weight in seen.probs.split(seen.counts)[expert].tolist() if weight)
    return found != sorted(w for r, t, k in slots if (w := float(inputs[r].weights[t, k])))


def _name(known: dict[Row, list[tuple[tuple[int, int], tuple[int, ...]]]], row: Row) -> str:
    if row not in known:
        return "?(" + ",".join(f"{value:g}" for value in row) + ")"
    (rank, token), _ = known[row][0]
    return f"r{rank}t{token}"


def _returned(world: World, run: Run, expected: Expected) -> list[str]:
    lines = []
    for rank, (seen, given) in enumerate(zip(run.seen, run.inputs, strict=True)):
        if seen.out.shape != given.tokens.shape:
            lines.append(
                f"  rank {rank}: shape {list(seen.out.shape)}   <-- should be {list(given.tokens.shape)}"
            )
            continue
        parts, wrong = [], []
        for token, got in enumerate(seen.out):
            if first_wrong(got[None], expected.out[rank][token][None], world.torch_dtype) is None:
                parts.append(f"t{token} ok")
                continue
            owners = [
                f"r{r}t{t}"
                for r, values in enumerate(expected.out)
                for t, value in enumerate(values)
                if first_wrong(got[None], value[None], world.torch_dtype) is None
            ]
            parts.append(f"t{token} wrong")
            wrong.append(
                f"t{token} got what belongs to {owners[0]}" if owners else f"t{token} got what is nobody's"
            )
        line = f"  rank {rank}: {'  '.join(parts) or 'no token'}"
        lines.append(_cut(line + (f"   <-- {'; '.join(wrong)}" if wrong else "")))
    return lines


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 2] + " …"
