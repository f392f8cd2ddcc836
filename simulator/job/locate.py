"""Puts the file and line of a job in front of an error that names one of its fields."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hardware.errors import MeshcastError
from hardware.load import line_of
from simulator.job.job import JobFile


@contextmanager
def locate_errors(where: str, text: str) -> Iterator[None]:
    """Puts file and line in front of the place of an error that names a field of the job."""
    try:
        yield
    except MeshcastError as error:
        field = error.where.split(" ")[0]
        if not text or field.partition(".")[0] not in JobFile.model_fields:
            raise
        place = [int(key) if key.isdigit() else key for key in re.findall(r"[^.\[\]]+", field)]
        raise error.at(f"{where}:{line_of(text, tuple(place))}") from None
