"""What `isozyme verify --all` runs: a fixed list of layouts and kinds of models, and a few that are drawn.

Each family is one kind of model (a change of the recipe) with the layouts at which it is held to one rank.
Together they cover each axis alone, each pair of axes, all of them folded into each other, and what may go
wrong only in company: heads that TP cannot divide, ends of a pipeline that share a weight, windows whose
capacity is cut across ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from isozyme.core.topology import Layout, Topology
from isozyme.launch.cli import parse_layout

LARGEST = 16
"""Simulated ranks."""

DEFAULT_RECIPE = "L0_sanity"
DEFAULT_MODEL = (
    "model.pattern=DM",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.moe.router.num_experts=8",
    "model.moe.router.aux_loss=0.05",
    "model.moe.router.z_loss=1.0e-3",
    "model.moe.shared_ffn=64",
)
"""What is verified if no recipe is named: dense and expert layers, a shared expert, two query heads on each
key/value head, both router losses (the balance loss by windows)."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model and the layouts at which it is compared with one rank."""

    name: str
    layouts: tuple[Layout, ...]
    """Compared in fp64."""
    overrides: tuple[str, ...] = ()
    """What this kind of model changes in the recipe."""
    fp32: tuple[Layout, ...] = ()
    """Compared in fp32 too, with each expert backend of the CPU and the reference's routing."""
    dispatcher: str = "alltoall"


def _family(name: str, *layouts: str, of: tuple[str, ...] = (), fp32: tuple[str, ...] = ()) -> Family:
    return Family(
        name=name,
        layouts=tuple(parse_layout(text) for text in layouts),
        overrides=of,
        fp32=tuple(parse_layout(text) for text in fp32),
    )


ALONE = _family(
    "each axis alone",
    *("tp=2", "cp=2", "dp=2", "pp=2", "ep=2", "etp=2"),
    fp32=("tp=2", "ep=2"),
)
PAIRS = _family(
    "each pair of axes",
    *("tp=2 cp=2", "tp=2 dp=2", "tp=2 pp=2", "tp=2 ep=2", "tp=2 etp=2"),
    *("cp=2 dp=2", "cp=2 pp=2", "cp=2 ep=2", "cp=2 etp=2"),
    *("dp=2 pp=2", "dp=4 ep=2", "dp=4 etp=2"),
    *("pp=2 ep=2", "pp=2 etp=2", "ep=2 etp=2"),
    fp32=("tp=2 ep=2", "cp=2 ep=2", "pp=2 ep=2"),
)

_TIED = ("model.tied=true",)
_INTERLEAVED = ("pipeline.schedule=interleaved", "pipeline.chunks=2")
_CAPACITY = ("model.moe.capacity_factor=1.0",)
_SHARDED = ("optim.sharded=true", "optim.overlap_reduce=true", "optim.overlap_gather=true")
_SIGMOID = (
    "model.moe.router.score=sigmoid",
    "model.moe.router.expert_bias_rate=1.0e-3",
    "model.moe.router.scaling_factor=2.5",
)

FAMILIES: tuple[Family, ...] = (
    ALONE,
    PAIRS,
    _family("long axes", "tp=4", "cp=4", "dp=4", "pp=4", "ep=4", "etp=4", "ep=8", "tp=4 ep=4", "cp=4 ep=8"),
    _family(
        "folded",
        *("tp=2 dp=2 ep=4", "tp=2 cp=2 ep=4", "tp=2 dp=2 etp=4", "tp=2 cp=2 dp=2 ep=8"),
        *("tp=2 pp=2 dp=2 ep=4", "tp=2 cp=2 pp=2 ep=4", "tp=2 cp=2 dp=2 ep=2 etp=2"),
        *("tp=2 cp=2 dp=2 pp=2 ep=4", "tp=2 cp=2 dp=2 pp=2 ep=2 etp=2", "tp=2 cp=2 dp=2 pp=2 ep=8"),
        fp32=("tp=2 cp=2 pp=2 ep=4",),
    ),
    _family(
        "ranks in another order", "tp=2 dp=2 ep=2 order=dp-ep-tp-cp-pp", "tp=2 cp=2 ep=2 order=cp-tp-ep-dp-pp"
    ),
    _family("fewer K/V heads than TP ranks", "tp=4 cp=2", "tp=4 pp=2 ep=2", "tp=4 dp=2 ep=4 etp=2"),
    _family("one K/V head", "tp=2", "tp=4 ep=2", "tp=2 cp=2", of=("model.num_kv_heads=1",)),
    _family(
        "CP by ring", "cp=2", "cp=4", "tp=2 cp=2", "cp=2 pp=2 ep=2", of=("model.attention.context=ring",)
    ),
    _family(
        "CP by Ulysses",
        *("cp=2", "cp=4", "tp=2 cp=2", "cp=2 pp=2 ep=2"),
        of=("model.attention.context=ulysses",),
    ),
    _family(
        "CP in contiguous shares",
        *("cp=2 ep=2", "cp=4", "tp=2 cp=2"),
        of=("model.attention.context_order=contiguous",),
    ),
    _family("tied embedding", "tp=2", "pp=2", "pp=4", "tp=2 pp=2", "cp=2 pp=2", "pp=2 ep=2", of=_TIED),
    _family("interleaved pipeline", "pp=2", "tp=2 pp=2 ep=2", "cp=2 pp=2", "dp=4 pp=2 ep=2", of=_INTERLEAVED),
    _family(
        "interleaved pipeline, tied embedding", "pp=2", "tp=2 dp=2 pp=2 ep=4", of=(*_INTERLEAVED, *_TIED)
    ),
    _family("GPipe", "pp=2", "cp=2 pp=2 etp=2", of=("pipeline.schedule=gpipe",)),
    _family("capacity", "ep=2", "tp=2 ep=2", "cp=2 ep=2", "pp=2 ep=2", "tp=2 cp=2 etp=2", of=_CAPACITY),
    _family(
        "capacity by position",
        *("cp=2 ep=2", "tp=2 cp=2 ep=4"),
        of=("model.moe.capacity_factor=0.75", "model.moe.drop_policy=position"),
    ),
    _family(
        "capacity, padded exchange",
        *("ep=4", "tp=2 cp=2 ep=4"),
        of=("model.moe.capacity_factor=1.25", "model.moe.pad_to_capacity=true"),
    ),
    _family(
        "sharded optimiser, overlapped sums and gathers",
        *("dp=2", "tp=2 dp=2 ep=4", "cp=2 ep=2", "tp=2 cp=2 dp=2 pp=2 ep=4"),
        of=_SHARDED,
    ),
    _family("sharded optimiser, tied embedding", "pp=2", "dp=2 pp=2 ep=2", of=(*_SHARDED, *_TIED)),
    _family("layers recomputed", "tp=2 cp=2 ep=4", "pp=2 ep=2", "ep=2 etp=2", of=("model.recompute=full",)),
    _family("cores recomputed", "tp=2 cp=2 ep=4", "pp=2 ep=2", of=("model.recompute=selective",)),
    _family("sigmoid scores and a balance bias", "tp=2 ep=2", "cp=2 pp=2 ep=2", of=_SIGMOID),
    _family(
        "delayed gradients beside a shared expert, balance by the step before",
        *("tp=2 ep=2", "cp=2 pp=2 ep=2"),
        of=(
            "model.moe.delay_wgrad=true",
            "model.moe.shared_ffn=32",
            "model.moe.router.aux_scope=global_lagged",
        ),
    ),
    _family(
        "experts in groups",
        *("tp=2 ep=2", "cp=2 ep=4"),
        of=("model.moe.router.num_groups=2", "model.moe.router.topk_groups=1"),
    ),
    Family(
        name="tokens gathered",
        layouts=tuple(parse_layout(text) for text in ("ep=2", "tp=2 ep=4", "cp=2 pp=2 ep=2 etp=2")),
        dispatcher="allgather",
    ),
)
"""In the order in which they are printed."""

_FEATURES: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((), _TIED),
    ((), _CAPACITY, ("model.moe.capacity_factor=0.75", "model.moe.drop_policy=position")),
    ((), ("model.attention.context=ring",), ("model.attention.context=ulysses",)),
    ((), _INTERLEAVED),
    ((), _SHARDED),
    ((), ("model.recompute=full",), ("model.recompute=selective",)),
    ((), _SIGMOID),
    ((), ("model.num_kv_heads=1",)),
)
"""Of each line a draw takes one."""


def draws(seed: int, count: int, possible: Callable[[Family, Layout], bool]) -> list[Family]:
    """Layouts of 4 to 16 ranks and kinds of models, drawn at random but the same for the same seed.

    Args:
        seed: of the draws.
        count: how many.
        possible: whether the recipe can be changed and cut so; others are drawn instead.

    >>> [str(family.layouts[0]) for family in draws(0, 2, lambda family, layout: True)]
    ['tp=2 cp=2 dp=4 ep=4 etp=2', 'tp=4 cp=2 dp=2 ep=2']
    """
    chosen = random.Random(seed)
    found: list[Family] = []
    for _ in range(1000):
        if len(found) == count:
            break
        tp, cp, dp, pp, ep, etp = (chosen.choice((1, 1, 2, 2, 4)) for _ in range(6))
        overrides = tuple(text for options in _FEATURES for text in chosen.choice(options))
        layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)
        family = Family(name=f"draw {len(found) + 1}", layouts=(layout,), overrides=overrides)
        if layout.problems() or not 4 <= Topology(layout).world_size <= LARGEST:
            continue
        if possible(family, layout):
            found.append(family)
    return found
