"""Calibrations of the machine at hand: a small fixed set of kernels and collectives, measured and fitted.

``works`` is the set, ``describe`` what the device is, ``calibrate`` measures, fits and writes.
"""
