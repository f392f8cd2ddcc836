"""Published auto-parallel planners over shared cores, at the prices of their papers and at those of this program."""
