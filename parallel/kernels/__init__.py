"""Fused operations over parameters, gradients and optimiser state, each with a plain-PyTorch twin."""
