"""Tables of measured collectives: readers of their formats, forecasts, calibrations of links, and goals.

``reader`` reads tables of collectives, ``validation.calibration.kernels.dispatch`` those of calls that dispatch tokens;
``sample`` forecasts, ``calibrate`` fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshcast.validation.calibration.collectives import reader
from meshcast.validation.calibration.collectives.calibrate import calibrate, names, title
from meshcast.validation.calibration.collectives.sample import compare_sample
from meshcast.validation.calibration.kernels import dispatch
from meshcast.validation.calibration.tables import table
from meshcast.validation.calibration.tables.summary import Goals
from meshcast.validation.calibration.tables.table import LibraryTable

__all__ = ["GOALS", "calibrate", "compare_sample", "names", "read", "title"]

READERS: tuple[Any, ...] = (reader, dispatch)

RINGS = ("all_reduce", "all_gather", "reduce_scatter")

GOALS: Goals = {
    **{("ring", kind, "node-large"): (0.07, 0.18) for kind in RINGS},
    **{("ring", kind, "node-small"): (0.15, 0.35) for kind in RINGS},
    ("all_to_all", "all_to_all", "alltoall-large"): (0.12, 0.30),
    ("network", "all_reduce", "multinode-large"): (0.12, 0.30),
}


def read(path: Path) -> LibraryTable:
    """Returns the collectives of a .csv or .csv.gz file."""
    return table.read(path, READERS)
