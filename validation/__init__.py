"""Forecasts beside reality: torch kernels and training steps, published runs, closed forms. Torch is used here only."""
