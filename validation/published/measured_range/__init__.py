"""What published runs have measured, and how far a forecast goes beyond: best utilisation, combinations of a plan."""
