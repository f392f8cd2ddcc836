"""Plots of simulated training runs."""
