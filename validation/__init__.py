"""Forecasts beside real work: torch kernels and training steps, published runs, closed forms; torch is used here only."""
