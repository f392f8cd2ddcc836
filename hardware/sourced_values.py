"""The values of a catalog file with their sources, for tables of what a forecast was computed from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshcast.hardware.gpu import GPU
from meshcast.hardware.link import Link
from meshcast.hardware.load import Fact, Value
from meshcast.hardware.node import Node
from meshcast.hardware.schemas import BaseModel

DEVICES = (GPU, Link, Node)
"""Models of catalog files that others name."""


def sourced_values(model: BaseModel, path: str = "") -> Iterator[tuple[str, Value | Fact]]:
    """Yields the sourced values of a file, by the paths of their fields; without those of files that it names."""
    for name in type(model).model_fields:
        yield from _find_values(getattr(model, name), f"{path}{name}")


def _find_values(item: Any, path: str) -> Iterator[tuple[str, Value | Fact]]:
    if isinstance(item, Value | Fact):
        yield path, item
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from _find_values(value, f"{path}.{key}")
    elif isinstance(item, BaseModel) and not isinstance(item, DEVICES):
        yield from sourced_values(item, f"{path}.")
