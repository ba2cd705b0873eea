"""Rank arithmetic: which rank has which coordinates, and who is in a group with whom.

One set of ranks is factorised twice: dense TP x CP x DP x PP and expert ETP x EP x EDP x PP. Everything
here is pure integer arithmetic: no rank talks, nothing is enumerated, and a million ranks cost nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from isozyme.core.errors import Rules, divisors

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Grid:
    """A mixed-radix numbering of ranks: `rank = Σ index_i · Π_{j<i} size_j`, leftmost axis fastest.

    >>> grid = Grid(("tp", "dp"), (2, 3))
    >>> grid.coordinates(5)
    {'tp': 1, 'dp': 2}
    >>> grid.group(5, "dp"), grid.group(5, "tp")
    ((1, 3, 5), (4, 5))
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks: the product of all sizes."""
        return math.prod(self.sizes)

    def size(self, axes: str | Iterable[str]) -> int:
        """The number of ranks in one group over an axis or several."""
        names = _names(axes)
        return math.prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of `rank` on every axis."""
        found = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given index on every axis (the inverse of `coordinates`)."""
        number, stride = 0, 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            number += coordinates[axis] * stride
            stride *= size
        return number

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` on the named axes only; `rank` is one of them."""
        names = _names(axes)
        here, members, stride = self.coordinates(rank), [rank], 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis in names:
                members = [m + (i - here[axis]) * stride for m in members for i in range(size)]
            stride *= size
        return tuple(sorted(members))

    def split_axis(self, axis: str, inner: int) -> Grid:
        """The same ranks with `axis` refined into `axis%inner` (the fastest) and `axis//inner`.

        The names say the index: a rank at `tp` has the index `tp % inner` on the one and `tp // inner` on the
        other. K/V heads replicated inside TP use it: with 2 heads on tp=4, the ranks along `tp%2` hold the
        same head, and those along `tp//2` different ones.

        Raises:
            ValueError: if `inner` does not divide the axis.

        >>> Grid(("tp",), (4,)).split_axis("tp", 2).group(3, "tp%2")
        (2, 3)
        """
        where = self.axes.index(axis)
        outer, rest = divmod(self.sizes[where], inner)
        if rest:
            raise ValueError(f"{axis}={self.sizes[where]} is not divisible by {inner}.")
        return Grid(
            (*self.axes[:where], f"{axis}%{inner}", f"{axis}//{inner}", *self.axes[where + 1 :]),
            (*self.sizes[:where], inner, outer, *self.sizes[where + 1 :]),
        )

    def refined(self, axes: Iterable[str]) -> Grid:
        """This grid, with every axis split that `axes` names a part of, such as `tp%2` or `tp//2`."""
        grid = self
        for name in axes:
            part = re.fullmatch(r"(\w+)(?:%|//)(\d+)", name)
            if part is not None and name not in grid.axes and part[1] in grid.axes:
                grid = grid.split_axis(part[1], int(part[2]))
        return grid


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes as the user gives them. `dp` counts dense replicas; `None` takes the smallest legal one.

    `ep` divides `tp * cp * dp`. The BioNeMo recipe's `dp` is called expert data parallel (`edp`) here.
    """

    tp: int = 1
    cp: int = 1
    dp: int | None = None
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: str = DEFAULT_ORDER

    def problems(self, world_size: int | None = None) -> list[str]:
        """Every broken rule in words, with its arithmetic and the legal values; empty for a legal layout."""
        rules = Rules("layout")
        sizes = {axis: getattr(self, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
        if self.dp is not None:
            sizes["dp"] = self.dp
        for axis, size in sizes.items():
            rules.check(
                size >= 1, f"a parallel size must be at least 1: layout.{axis}={size}. Use 1 or more."
            )
        given = self.order.split("-")
        if sorted(given) != sorted(DEFAULT_ORDER.split("-")):
            rules.check(
                False,
                f"layout.order must name each of tp, cp, ep, dp, pp once: layout.order={self.order}. "
                f"The default is {DEFAULT_ORDER}.",
            )
        else:
            rules.check(
                given[-1] == "pp",
                f"pp must be outermost (last) in layout.order, else dense and expert pipeline groups differ: "
                f"layout.order={self.order}. Move pp to the end.",
            )
        if rules.broken:
            return rules.broken
        whole = self.resolved()
        assert whole.dp is not None
        dense = whole.tp * whole.cp * whole.dp
        rules.check(
            dense % (whole.etp * whole.ep) == 0,
            f"etp*ep must divide tp*cp*dp: etp={whole.etp}, ep={whole.ep}, tp={whole.tp}, cp={whole.cp}, "
            f"dp={whole.dp}; {dense} % {whole.etp * whole.ep} = {dense % (whole.etp * whole.ep)}. "
            f"Choose etp*ep from {', '.join(map(str, divisors(dense)))}, or leave dp out.",
        )
        if world_size is not None and not rules.broken:
            need = dense * whole.pp
            rules.check(
                need == world_size,
                f"tp*cp*dp*pp must equal the number of ranks: tp={whole.tp}, cp={whole.cp}, dp={whole.dp}, "
                f"pp={whole.pp} need {need} ranks, but there are {world_size}. "
                + (
                    f"Set layout.dp={world_size // (need // whole.dp)}."
                    if world_size % (need // whole.dp) == 0
                    else f"Start a multiple of {need // whole.dp} ranks."
                ),
            )
        return rules.broken

    def resolved(self) -> Layout:
        """This layout with `dp` filled in: the smallest for which `etp * ep` divides `tp * cp * dp`."""
        if self.dp is not None:
            return self
        block = self.etp * self.ep
        return replace(self, dp=block // math.gcd(block, self.tp * self.cp))

    def __str__(self) -> str:
        whole = self.resolved()
        sizes = {axis: getattr(whole, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}
        return " ".join(f"{a}={n}" for a, n in sizes.items() if n != 1 or a == "dp")


class Topology:
    """A legal layout as two grids over the same ranks.

    Axis names: dense `tp cp dp pp`, expert `etp ep edp pp`. Methods take one name or several of one grid; a
    name may also be a part of an axis, such as `tp%2` or `tp//2` (see `Grid.split_axis`).

    >>> topology = Topology(Layout(dp=4, ep=2))
    >>> topology.world_size, topology.size("edp"), topology.group(3, "ep"), topology.group(3, "edp")
    (4, 2, (2, 3), (1, 3))
    """

    def __init__(self, layout: Layout) -> None:
        rules = Rules("layout")
        rules.extend(layout.problems())
        rules.raise_if_broken()
        self.layout = whole = layout.resolved()
        assert whole.dp is not None
        edp = whole.tp * whole.cp * whole.dp // (whole.etp * whole.ep)
        dense_size = {"tp": whole.tp, "cp": whole.cp, "dp": whole.dp, "pp": whole.pp}
        expert_size = {"etp": whole.etp, "ep": whole.ep, "edp": edp, "pp": whole.pp}
        order = whole.order.split("-")
        dense = [axis for axis in order if axis != "ep"]
        to_expert = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
        expert = [to_expert[axis] for axis in order if axis != "cp"]
        self.dense = Grid(tuple(dense), tuple(dense_size[axis] for axis in dense))
        self.expert = Grid(tuple(expert), tuple(expert_size[axis] for axis in expert))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dense.world_size

    def grid(self, axes: str | Iterable[str]) -> Grid:
        """The grid that has all the named axes, refined where parts of axes are named.

        Raises:
            ValueError: if neither grid has them all.
        """
        names = _names(axes)
        for grid in (self.dense.refined(names), self.expert.refined(names)):
            if set(names) <= set(grid.axes):
                return grid
        raise ValueError(
            f"no grid has the axes {sorted(names)} together; dense: {DENSE_AXES}, expert: {EXPERT_AXES}."
        )

    def size(self, axes: str | Iterable[str]) -> int:
        """The number of ranks in one group over the named axes."""
        return self.grid(axes).size(axes)

    def group(self, rank: int, axes: str | Iterable[str]) -> tuple[int, ...]:
        """The ranks, ascending, that differ from `rank` on the named axes only."""
        return self.grid(axes).group(rank, axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of `rank` on every axis of both grids."""
        return self.dense.coordinates(rank) | self.expert.coordinates(rank)

    def index(self, rank: int, axis: str) -> int:
        """The index of `rank` on one axis, or on a part of one."""
        return self.grid(axis).coordinates(rank)[axis]

    def embedding_group(self, rank: int) -> tuple[int, ...]:
        """The first and the last pipeline stage of `rank`'s pipeline, which share a tied embedding."""
        stages = self.dense.group(rank, "pp")
        return (stages[0], stages[-1]) if len(stages) > 1 else stages

    def table(self, limit: int = 64) -> str:
        """A plain-text table of the coordinates of the first `limit` ranks."""
        axes = ["tp", "cp", "dp", "pp", "etp", "ep", "edp"]
        lines = ["rank " + " ".join(f"{axis:>4}" for axis in axes)]
        for rank in range(min(limit, self.world_size)):
            at = self.coordinates(rank)
            lines.append(f"{rank:>4} " + " ".join(f"{at[axis]:>4}" for axis in axes))
        if self.world_size > limit:
            lines.append(f" ... {self.world_size - limit} more")
        return "\n".join(lines)


def _names(axes: str | Iterable[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)
