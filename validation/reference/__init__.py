"""The reference trainer: a plain PyTorch transformer with its optimizer, which measured jobs run."""
