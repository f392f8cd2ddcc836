"""Measurement files: format, device, forecasts written before a measurement, comparison, campaigns, imports."""
