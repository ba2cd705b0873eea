"""Property tests for routers, permutations, dispatchers and layers: ours and anybody's.

`check_dispatcher`, `check_permutation`, `check_router`, `check_capacity` and `check_moe_layer` take an object
and look for a smallest world (ranks, tokens, routing, order of events) in which it breaks a claim. They need
neither a GPU nor processes: ranks are simulated. Importing this package needs hypothesis; nothing else in
isozyme does.
"""

from isozyme.moe.testing.adapters import Place, TensorDispatcher
from isozyme.moe.testing.capacity import CapacityWorld, capacity_worlds, check_capacity, parse_capacity
from isozyme.moe.testing.dispatcher import ISOZYME, TORCH, check_dispatcher, check_permutation
from isozyme.moe.testing.layer import LayerUnderTest, check_moe_layer
from isozyme.moe.testing.layer_world import LayerPromises, LayerWorld, layer_worlds, parse_layer
from isozyme.moe.testing.router import check_router
from isozyme.moe.testing.router_world import RouterPromises, RouterWorld, parse_router, router_worlds
from isozyme.moe.testing.search import Report
from isozyme.moe.testing.strategies import Promises, layouts, routings, schedules, wishes, worlds
from isozyme.moe.testing.violation import CLAIMS, Violation
from isozyme.moe.testing.world import World, parse

__all__ = [
    "CLAIMS",
    "ISOZYME",
    "TORCH",
    "CapacityWorld",
    "LayerPromises",
    "LayerUnderTest",
    "LayerWorld",
    "Place",
    "Promises",
    "Report",
    "RouterPromises",
    "RouterWorld",
    "TensorDispatcher",
    "Violation",
    "World",
    "capacity_worlds",
    "check_capacity",
    "check_dispatcher",
    "check_moe_layer",
    "check_permutation",
    "check_router",
    "layer_worlds",
    "layouts",
    "parse",
    "parse_capacity",
    "parse_layer",
    "parse_router",
    "router_worlds",
    "routings",
    "schedules",
    "wishes",
    "worlds",
]
