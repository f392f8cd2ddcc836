"""Real kernels of one rank, measured module by module."""
