"""Calls of torch's trackers, whose imports take a second: in the process that they run in alone."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def track(function: str, *given: Any) -> Any:
    """Returns what a function of `tracked` does."""
    return getattr(import_module("tests.validation.activations.tracked"), function)(*given)
