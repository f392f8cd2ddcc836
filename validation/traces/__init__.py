"""A profiler trace of a real step beside the simulated one."""
