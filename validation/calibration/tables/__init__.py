"""Tables of measurements: their formats, their rows beside forecasts, and the errors of forecasts."""
