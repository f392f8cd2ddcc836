"""Reads a model that is code, by running its forward pass without weights: Hugging Face types without a reader, and
modules of PyTorch that a job names."""
