"""What other programs write, read into plain data: nccl-tests, torch's profiler, logs of training frameworks."""
