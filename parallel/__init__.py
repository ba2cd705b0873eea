"""How ranks talk and how tensors are laid out over them. Knows nothing of experts or models."""
