"""Makers of pages, of figures of papers and of tables that ship: run by make in a checkout, not installed."""
