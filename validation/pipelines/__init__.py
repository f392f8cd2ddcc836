"""Schedules beside closed forms and beside the shortest schedule there can be."""
