"""Plots of reports, sweeps and comparisons in a common style (`style`); commands import them only to draw."""
