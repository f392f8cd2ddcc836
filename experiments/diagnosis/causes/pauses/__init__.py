"""Causes that lengthen single steps, by what a log says between the lines of these, and by their period."""
