"""Calibration of GPUs: tables of measured kernels, their forecasts, and fits."""
