"""Checks of an installation against itself: relations that hold for any job, and the completeness of its data."""
