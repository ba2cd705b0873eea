"""The arithmetic of the experts: one backend a file behind one protocol, over one way to store weights."""
