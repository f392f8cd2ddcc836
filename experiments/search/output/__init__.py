"""What a search shows and writes: its page, its plot, and its rows."""
