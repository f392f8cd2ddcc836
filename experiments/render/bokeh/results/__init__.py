"""The report of many plans, from the result files of sweeps and searches: a module for each section."""
