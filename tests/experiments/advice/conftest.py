"""Advice of all tests shares its work."""

from tests.experiments.shared_work import one_work

__all__ = ["one_work"]
