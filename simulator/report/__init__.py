"""What came out: figures, breakdown, memory, trace, and the pages of the schemes."""
