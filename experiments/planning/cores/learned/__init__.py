"""Searches that train a policy; they need torch."""
