"""Whole training steps, and collectives alone, with real processes: the reference trainer over torch.distributed."""
