"""How many points a space has."""
