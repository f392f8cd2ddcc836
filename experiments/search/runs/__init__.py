"""Searches by the length or the cost of simulated runs: the fields of the run, and the runs of each plan."""
