"""Property tests for routers, permutations, dispatchers and layers: ours and anybody's."""
