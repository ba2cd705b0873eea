"""Decoders assembled from the primitives, and their presets."""
