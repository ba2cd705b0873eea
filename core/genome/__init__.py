"""Genome data: from a FASTA file to batches of windows that depend on the sample's index alone."""
