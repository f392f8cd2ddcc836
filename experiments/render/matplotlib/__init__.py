"""Plots of reports, sweeps and comparisons in one style (`style`); commands import them only to draw one."""
