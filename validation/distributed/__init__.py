"""Training steps of the reference trainer, and single collectives, on several processes with torch.distributed."""
