"""Searches of plans whose stages, or whose replicas, have unlike degrees."""
