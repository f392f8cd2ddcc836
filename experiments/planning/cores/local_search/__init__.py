"""Searches that improve or complete a plan step by step: neighbourhoods, moves between stages, walks over grids."""
