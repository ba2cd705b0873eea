"""isozyme: Megatron-style parallelism for mixture-of-experts models of biological sequences."""

__all__ = ["__version__"]

__version__ = "0.1.0"
