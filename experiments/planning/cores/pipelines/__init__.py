"""Searches of planners of pipelines: partitions, strategies of layers, groups of devices."""
