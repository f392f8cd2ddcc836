"""From a file or a mapping, a job file or a launch file of a training program, to a checked job."""
