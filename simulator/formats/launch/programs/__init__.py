"""One module for each program whose launch files are read or written, and what the programs on Megatron-Core share."""
