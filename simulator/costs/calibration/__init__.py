"""Calibrated coefficients of the cost models: a YAML file per GPU and per family of links."""
