"""Calibration: from tables of measurements to the coefficients of the cost models."""
