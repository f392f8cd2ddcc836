"""Calibration of the machine at hand: a fixed set of kernels and collectives, measured and fitted."""
