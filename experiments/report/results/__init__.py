"""The report of many plans, from the result files of sweeps and searches: reading them, and a module for each section."""
