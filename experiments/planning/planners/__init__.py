"""Planners, each in a file; the file's name, with ``-`` for ``_``, is the planner's."""
