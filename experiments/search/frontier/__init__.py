"""The frontier of a search: lower bounds, branch and bound by them, its workers, and the best plans so far."""
