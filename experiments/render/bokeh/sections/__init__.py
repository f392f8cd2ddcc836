"""Sections of the report of a forecast, a module each."""
