"""Published auto-parallel planners over shared cores, at their own prices (paper mode) and at those of this program."""
