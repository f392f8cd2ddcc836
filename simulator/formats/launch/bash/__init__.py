"""Shell scripts by bash's grammar: the commands that a script would run, without running any of it."""
