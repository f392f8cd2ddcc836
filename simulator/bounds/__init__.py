"""Lower bounds of the step time and memory of a plan, without building or playing its program: for searches."""
