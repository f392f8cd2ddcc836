"""Plays a program: longest path, (max,+) matrices, or SimPy processes; all give the same answer."""
