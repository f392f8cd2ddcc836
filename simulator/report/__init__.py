"""The report of a forecast: figures, breakdown, JSON answer, trace; and the generated pages of figures and schemes."""
