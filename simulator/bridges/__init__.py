"""Readers of other programs' output: nccl-tests, torch's profiler, training logs, torch's schedules, token counts."""
