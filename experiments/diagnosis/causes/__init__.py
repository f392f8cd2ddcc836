"""Causes of slow runs: a module each, with the detector that looks for it."""
