"""Adds file and line of the job to errors about its fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.load import line_of
from meshcast.hardware.units import read_digits
from meshcast.simulator.job.job import JobFile


@contextmanager
def locate_errors(where: str, text: str, places: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Adds file and line to the place of an error about a field of the job.

    where: path of the job file.
    text: its text; empty: the job comes from a mapping, and errors stay as they are.
    places: of a launch file, the setting behind each key, which an error about that key names.
    """
    try:
        yield
    except MeshcastError as error:
        rest = error.where.removeprefix("job.")  # of a mapping, which here is that of the file
        field = rest.split(" ")[0]
        if field in places:
            raise type(error)(f"{places[field]} ({rest})", error.rule, error.remedy, error.value) from None
        if not text or field.partition(".")[0] not in JobFile.model_fields:
            raise
        keys = re.findall(r"[^.\[\]]+", field)
        place = [key if (number := read_digits(key)) is None else number for key in keys]
        line = line_of(text, tuple(place))
        raise type(error)(f"{where}:{line} {rest}", error.rule, error.remedy, error.value) from None
