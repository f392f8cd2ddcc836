"""Files of other programs: launch files, profiler traces, training logs, nccl-tests, schedules, token counts."""
