"""Sections of the report of one forecast, a module each."""
