"""Measurements of the kernels of a rank, module by module."""
