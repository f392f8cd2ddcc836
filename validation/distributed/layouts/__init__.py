"""Runs the operators of a model in the layouts that the schemes of a plan give them, beside serial training."""
