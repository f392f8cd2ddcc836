"""What a search answers: its best plans forecast whole, plans beside them, and the smallest need where none fits."""
