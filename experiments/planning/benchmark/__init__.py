"""The benchmark table: what planners propose for a job, and how far each plan is from the certified optimum."""
