"""Least durations of the passes of units, from the works of their operators and without lowering them."""
