"""Forecasts of many plans at once: what they share is made once, and compiled loops play the rest."""
