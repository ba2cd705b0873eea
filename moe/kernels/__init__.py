"""Fused operations around the grouped GEMMs: each a torch operator with a plain-PyTorch twin.

On a CPU an operator runs its twin; on CUDA it launches the Triton kernel of `triton_<name>.py`, which is
imported only then. Tests hold each kernel to its twin under Triton's interpreter and on the GPU.

Row maps: `slot_row[t, k]` is the row of slot k of token t in the expert-major buffer, or -1 for a slot that
is not kept. Indices are stored as int32 (a buffer has fewer than 2^31 rows); every address is computed in
int64, since rows * hidden passes 2^31 easily.
"""
