"""Measurement files: their format, the measured device, blind forecasts, errors, campaigns, imports."""
