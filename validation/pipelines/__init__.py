"""Schedules against closed forms and against the shortest possible schedule."""
