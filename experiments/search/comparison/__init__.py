"""A given plan beside the best one of a search: factor, fields that differ, parts of the step, place in the space."""
