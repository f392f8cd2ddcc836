"""Calibrated coefficients of the cost models: one YAML file per GPU and per family of links."""
