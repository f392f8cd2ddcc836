"""Calibration of the machine at hand: a fixed set of kernels and collectives is measured and fitted."""
