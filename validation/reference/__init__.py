"""A plain trainer in PyTorch: the stages, the optimizer and the data that measured jobs run."""
