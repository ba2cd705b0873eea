"""The choice of a dispatcher."""

from __future__ import annotations

from typing import Literal

from isozyme.core.errors import ConfigError
from isozyme.moe.dispatch_allgather import AllGatherDispatcher
from isozyme.moe.dispatch_alltoall import AllToAllDispatcher
from isozyme.moe.dispatch_local import LocalDispatcher
from isozyme.moe.grouping import ArrivalDispatcher
from isozyme.moe.placement import ExpertPlacement

DispatcherName = Literal["auto", "local", "allgather", "alltoall"]


def choose_dispatcher(
    name: DispatcherName, placement: ExpertPlacement, *, equal_tokens: bool = False
) -> tuple[ArrivalDispatcher, str]:
    """The dispatcher of that name, and why that one.

    `auto` takes the local one where one rank holds all experts, else the all-to-all.

    Args:
        name: which.
        placement: which rank holds which expert.
        equal_tokens: see `AllGatherDispatcher`.

    Raises:
        ConfigError: if `local` is asked for although experts are spread over ranks.
    """
    ranks = placement.communicator.size
    if name == "local" and ranks > 1:
        raise ConfigError(
            f"the local dispatcher holds all experts on one rank: dispatcher=local, ep={placement.ep}, "
            f"etp={placement.etp}. Use alltoall, allgather or auto."
        )
    if name == "local":
        return LocalDispatcher(), "local, as asked"
    if name == "allgather":
        return AllGatherDispatcher(placement, equal_tokens=equal_tokens), "allgather, as asked"
    if name == "alltoall":
        return AllToAllDispatcher(placement), "alltoall, as asked"
    if ranks == 1:
        return LocalDispatcher(), "auto chose local (one rank holds all experts)"
    return AllToAllDispatcher(placement), f"auto chose alltoall (experts on {ranks} ranks)"
