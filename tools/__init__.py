"""Makers of pages and of figures of papers: run by make in a checkout, not installed."""
