"""Loops over arrays that numba compiles: the inner loops of forecasts in batch."""
