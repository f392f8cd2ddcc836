"""The plan of a job, resolved and checked."""
