"""The command line: one function per command, error messages, exit codes."""
