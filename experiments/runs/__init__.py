"""Many simulated runs of a job: on all cores, stored and resumed; curves over intervals, scales, failures."""
