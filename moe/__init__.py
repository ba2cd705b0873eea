"""Mixture-of-experts primitives: router, permutation, dispatchers, experts and the layer they form."""
