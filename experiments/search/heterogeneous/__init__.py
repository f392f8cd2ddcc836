"""Searches of plans whose stages, or whose replicas, differ in degrees and in shares of the batch."""
