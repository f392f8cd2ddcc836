"""Many simulated runs of a job: on all cores, stored and resumed, and curves over intervals, scales and failure rates."""
