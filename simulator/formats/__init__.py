"""Files of other programs: launch files, profiler traces, training logs, nccl-tests, torch's schedules, token counts."""
