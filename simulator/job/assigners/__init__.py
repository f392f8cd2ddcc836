"""Assign the samples of a step to groups of ranks of different context-parallel degrees, by published algorithms."""
