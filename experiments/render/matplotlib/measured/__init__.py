"""Plots of forecasts beside what was measured: published runs, tables of kernels, measurement files, traces."""
