"""Shares an object among equal descriptions: objects are built once for equal data.

Descriptions are frozen, so they can be shared. A program that forecasts thousands of jobs builds each of its clusters,
models and frameworks once, and caches that are keyed by these objects find them again.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from meshcast.hardware.remembered import remember

Made = TypeVar("Made")

MAX_DESCRIPTIONS = 1000
"""Most objects that are kept, so that a sweep over many models does not fill the memory."""

PLAIN = (str, int, float, bool, type(None), datetime.date)

_made: dict[Hashable, Any] = {}


def shared_instance(kind: Hashable, data: Any, make: Callable[[], Made]) -> Made:
    """Returns the object that `make` returns for `data`, the same for equal data of a `kind`; errors are not kept.

    Data with anything but mappings, lists and plain values, or that contains itself, gives a new object each time.
    """
    try:
        key = kind, frozen(data)
    except (TypeError, RecursionError):
        return make()
    shared: Made = remember(_made, key, make, MAX_DESCRIPTIONS)
    return shared


def shared_flat(kind: Hashable, data: Mapping[str, Any], make: Callable[[], Made]) -> Made:
    """Returns the same for a mapping in which a mapping may have an order that matters; then a new object."""
    ordered = any(isinstance(value, Mapping | list | tuple) for value in data.values())
    return make() if ordered else shared_instance(kind, dict(data), make)


def frozen(data: Any) -> Hashable:
    """Returns `data` as a key. The order of a mapping does not matter, the type of a value does: 1 is neither 1.0 nor
    true.

    Raises TypeError for data that is not plain.
    """
    kind = type(data)
    if kind in PLAIN:
        return kind, data
    if kind is dict:
        return dict, frozenset((key, frozen(value)) for key, value in data.items())
    if kind is list or kind is tuple:
        return list, tuple(map(frozen, data))
    raise TypeError(f"{kind.__name__} is not plain")
