"""Nested data in Python's types, as YAML and JSON have them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Fields = dict[str, Any]
"""Keys of a mapping of YAML or JSON with their values, and fields of a job by their names."""

SomeFields = Mapping[str, Any]
"""The same, for reading."""

PLAIN = {str, int, float, bool, type(None)}
"""Types of values that nothing changes."""


def to_plain_data(value: Any) -> Any:
    """Returns a copy of nested data: numbers and arrays of NumPy, rows of pandas, tuples and ranges become numbers and
    lists.

    Objects of other kinds, such as models in the mapping of a job, are copied as they are.

    >>> to_plain_data({"plan.tp": range(1, 3), "plan.zero": (0, 1)})
    {'plan.tp': [1, 2], 'plan.zero': [0, 1]}
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {key: to_plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range):
        return [to_plain_data(item) for item in value]
    if type(value).__module__.partition(".")[0] in ("numpy", "pandas") and hasattr(value, "tolist"):
        return to_plain_data(value.tolist())
    return copy.deepcopy(value)
