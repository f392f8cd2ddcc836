"""Sweeps, scaling curves and files of many jobs: grids, workers, stored rows."""
