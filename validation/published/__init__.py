"""Published training runs compared with forecasts: reading runs, mapping them to jobs, forecasts, errors, baseline."""
