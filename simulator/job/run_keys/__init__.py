"""Keys of a job for a whole training run: failures, checkpoints, recovery, stragglers, pauses."""
