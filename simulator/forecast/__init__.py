"""One job to one report."""
