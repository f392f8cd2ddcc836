"""Seconds of one kernel on one GPU: pure functions of the work, the GPU and the calibration."""
