"""Rows of measured tables beside their predictions, and summaries of their errors."""
