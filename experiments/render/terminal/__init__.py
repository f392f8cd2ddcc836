"""Pages and tables that commands print on a terminal."""
