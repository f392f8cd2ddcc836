"""The interface for Python and notebooks: forecasts and sweeps as objects with tables, figures and HTML."""
