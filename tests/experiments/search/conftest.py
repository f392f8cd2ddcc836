"""Searches of all tests share their work."""

from tests.experiments.shared_work import one_work

__all__ = ["one_work"]
