"""Property tests for routers, permutations, dispatchers and layers: ours and anybody's.

`check_dispatcher`, `check_permutation`, `check_router`, `check_capacity` and `check_moe_layer` take an object and look for
a smallest world (ranks, tokens, routing, order of events) in which it breaks a claim. They run without a GPU and
without processes, on simulated ranks. Importing this package needs hypothesis; nothing else in isozyme does.
"""

from isozyme.moe.testing.adapters import Place, TensorDispatcher
from isozyme.moe.testing.dispatcher import ISOZYME, TORCH, check_dispatcher, check_permutation
from isozyme.moe.testing.search import Report
from isozyme.moe.testing.strategies import Promises, layouts, routings, schedules, token_counts, worlds
from isozyme.moe.testing.violation import CLAIMS, Violation
from isozyme.moe.testing.world import World, parse

__all__ = [
    "CLAIMS",
    "ISOZYME",
    "TORCH",
    "Place",
    "Promises",
    "Report",
    "TensorDispatcher",
    "Violation",
    "World",
    "check_dispatcher",
    "check_permutation",
    "layouts",
    "parse",
    "routings",
    "schedules",
    "token_counts",
    "worlds",
]
