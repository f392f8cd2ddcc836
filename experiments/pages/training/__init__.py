"""What a terminal shows of simulated training runs."""
