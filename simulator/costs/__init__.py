"""Seconds: what every op takes on a cluster. No other room knows durations."""
