"""Fused operations of the dense layers, each a torch operator with a plain twin (as in `moe.kernels`)."""
