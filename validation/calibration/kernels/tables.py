"""Tables of measured kernels: readers of their formats, forecasts, calibrations of GPUs, and goals.

``gemm``, ``attention``, ``experts``, ``elementwise`` and ``dispatch`` read tables, ``routing`` computes how many tokens
each expert gets, ``predict`` forecasts, ``calibrate`` fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshcast.hardware import load
from meshcast.validation.calibration.kernels import attention, dispatch, elementwise, experts, gemm
from meshcast.validation.calibration.kernels.calibrate import calibrate, names
from meshcast.validation.calibration.kernels.predict import compare_sample
from meshcast.validation.calibration.tables import table
from meshcast.validation.calibration.tables.summary import Goals
from meshcast.validation.calibration.tables.table import LibraryTable

__all__ = ["GOALS", "calibrate", "compare_sample", "names", "read", "title"]

READERS: tuple[Any, ...] = (gemm, attention, experts, elementwise, dispatch)

GOALS: Goals = {
    ("gemm", "bf16", "large"): (0.04, 0.10),
    ("gemm", "bf16", "all"): (0.06, 0.18),
    ("gemm-fp8", "fp8", "large"): (0.07, 0.18),
    ("gemm-fp8", "fp8-block", "large"): (0.07, 0.18),
    ("gemm", "training", "large"): (0.06, 0.18),
    ("attention", "bf16", "forward-8k"): (0.07, 0.20),
    ("attention", "fp8", "forward-8k"): (0.07, 0.20),
    ("attention", "backward", "backward"): (0.08, 0.20),
    ("grouped", "grouped", "tuned-4k"): (0.10, 0.25),
    ("grouped", "experts-bf16", "tuned-4k"): (0.10, 0.25),
    ("grouped", "experts-fp8", "tuned-4k"): (0.10, 0.25),
    ("grouped", "experts-fp8-block", "tuned-4k"): (0.10, 0.25),
    ("memory", "norm", "large"): (0.12, 0.30),
    ("memory", "gated_act", "large"): (0.12, 0.30),
    ("memory", "gelu", "large"): (0.12, 0.30),
}


def read(path: Path) -> LibraryTable:
    """Returns the kernels of a .csv or .csv.gz file."""
    return table.read(path, READERS)


def title(name: str) -> str:
    """Returns the title of the file of a GPU."""
    return str(load("gpus", name).title)
