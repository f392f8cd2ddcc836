"""Seconds of a communication among GPUs: pure functions of the work, the links and the calibration."""
