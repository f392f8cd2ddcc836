"""A profiler trace of a real training step compared with the simulated step of the same job."""
