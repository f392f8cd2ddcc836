"""Readers of other programs' output: nccl-tests, torch's profiler, logs of training frameworks, torch's schedules."""
