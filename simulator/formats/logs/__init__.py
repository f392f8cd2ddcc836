"""Training logs: the lines that a training program prints for its iterations, and what else it says between them."""
