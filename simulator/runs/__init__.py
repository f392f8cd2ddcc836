"""Training runs of days or months: steps with stragglers, failures, checkpoints, recovery, by discrete events."""
