"""Measurements of the kernels of one rank, module by module."""
