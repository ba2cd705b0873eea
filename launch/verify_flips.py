"""Where a layout chose other experts, or dropped other slots, than one rank did.

One between scores that are apart is a fault; rounding may rank equal ones either way. What follows from such
a flip (later layers of the window, all later steps) says nothing, so only first differences are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from isozyme.launch.verify_routing import Flip, Key, WindowRouting


def changed_choices(
    own: Mapping[Key, WindowRouting],
    reference: Mapping[Key, WindowRouting],
    num_real: Callable[[int], int],
) -> list[Flip]:
    """The real tokens whose set of experts is not that of the reference; the gaps are not known.

    Args:
        own: one rank's routings.
        reference: whole windows.
        num_real: how many tokens at the beginning of a window are not padding.
    """
    flips = []
    for (window, layer), routing in sorted(own.items()):
        there = _rows(reference[window, layer], routing)
        valid = routing.places < num_real(window)
        differs = (_membership(routing) != _membership(there)).any(dim=1) & valid
        flips += [
            Flip(window=window, position=position, layer=layer, gap=float("inf"))
            for position in routing.places[differs].tolist()
        ]
    return flips


def changed_drops(
    own: Iterable[Mapping[Key, WindowRouting]], reference: Mapping[Key, WindowRouting]
) -> list[Flip]:
    """The experts that kept other slots of a window than in the reference, where all choices are the same.

    The gap is the largest difference of weight between a slot kept here alone and one kept there alone; it is
    infinite where their numbers differ.

    Args:
        own: the routings of every rank; the shares of a window are put together.
        reference: whole windows.
    """
    flips = []
    for (window, layer), routing in sorted(_together(own).items()):
        there = _rows(reference[window, layer], routing)
        here_by_expert, there_by_expert = _kept_probs(routing), _kept_probs(there)
        moved = (here_by_expert >= 0) != (there_by_expert >= 0)
        for expert in moved.any(dim=0).nonzero().flatten().tolist():
            only_here = here_by_expert[moved[:, expert] & (here_by_expert[:, expert] >= 0), expert]
            only_there = there_by_expert[moved[:, expert] & (there_by_expert[:, expert] >= 0), expert]
            gap = float("inf")
            if only_here.numel() == only_there.numel():
                both = torch.cat([only_here, only_there])
                gap = float(both.max() - both.min())
            flips.append(Flip(window=window, position=-1, layer=layer, gap=gap, dropped=True))
    return flips


def first_differences(chosen: Sequence[Flip], dropped: Sequence[Flip], global_batch: int) -> list[Flip]:
    """What is no consequence of something else that differs.

    Of the first step at which anything differs, each window's first layer; there, drops only if all choices
    are the same. Windows meet in the update after a step, and nowhere before it.

    Args:
        chosen: see `changed_choices`.
        dropped: see `changed_drops`.
        global_batch: windows a step.
    """
    found: list[Flip] = []
    everything = [*chosen, *dropped]
    first_step = min((flip.window // global_batch for flip in everything), default=0)
    for window in sorted({flip.window for flip in everything if flip.window // global_batch == first_step}):
        layer = min(flip.layer for flip in everything if flip.window == window)
        here = [[f for f in flips if (f.window, f.layer) == (window, layer)] for flips in (chosen, dropped)]
        found += here[0] or here[1]
    return found


def _together(parts: Iterable[Mapping[Key, WindowRouting]]) -> dict[Key, WindowRouting]:
    """Whole windows from the shares of several ranks, in the order of these; `places` says which tokens."""
    shares: dict[Key, dict[int, WindowRouting]] = {}
    for part in parts:
        for key, routing in part.items():
            shares.setdefault(key, {})[int(routing.places[0])] = routing
    found = {}
    for key, by_first in shares.items():
        ordered = [by_first[first] for first in sorted(by_first)]
        found[key] = WindowRouting(
            places=torch.cat([routing.places for routing in ordered]),
            topk_ids=torch.cat([routing.topk_ids for routing in ordered]),
            topk_probs=torch.cat([routing.topk_probs for routing in ordered]),
            kept=torch.cat([routing.kept for routing in ordered]),
            num_experts=ordered[0].num_experts,
        )
    return found


def _rows(whole: WindowRouting, part: WindowRouting) -> WindowRouting:
    """The rows of a whole window that `part` holds."""
    rows = part.places
    return WindowRouting(
        places=part.places,
        topk_ids=whole.topk_ids[rows],
        topk_probs=whole.topk_probs[rows],
        kept=whole.kept[rows],
        num_experts=whole.num_experts,
    )


def _membership(routing: WindowRouting) -> Bool[Tensor, "S E"]:
    empty = torch.zeros(routing.topk_ids.shape[0], routing.num_experts, dtype=torch.bool)
    return empty.scatter_(1, routing.topk_ids.cpu(), True)


def _kept_probs(routing: WindowRouting) -> Float[Tensor, "S E"]:
    """The combine weight of each kept slot by token and expert; -1 elsewhere."""
    empty = torch.full((routing.topk_ids.shape[0], routing.num_experts), -1.0, dtype=torch.float64)
    tokens, slots = routing.kept.cpu().nonzero().unbind(dim=1)
    experts = routing.topk_ids.cpu()[tokens, slots]
    empty[tokens, experts] = routing.topk_probs.cpu().double()[tokens, slots]
    return empty
