"""Calibration of links and networks: tables of measured collectives, their forecasts, and fits."""
