"""Pages of docs/ that are made from the code, its data and forecasts: ``python -m tools.pages.NAME docs/FILE.md``."""
