"""What stands on top: the command line, its terminal pages, and plots."""
