"""Samples of measured kernels, and the names of GPUs and number formats in tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshcast.hardware import gpus, load
from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import Work
from meshcast.validation.calibration.tables.rows import Rows


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelSample(Rows):
    """Rows of kernels.

    Attributes:
        parts: kernels of a row in turn, with arrays in their numeric fields; their times add up.
        tuned: whether the kernels were tuned for these sizes; others say little of the GPU.
    """

    parts: tuple[Work, ...]
    tuned: bool = True

    def shape(self, at: int) -> str:
        """Describes the sizes of a row, of the kernel with most FLOPs."""
        part = max(self.parts, key=lambda work: float(np.max(work.flops)))
        sizes = {name: getattr(part, name) for name in part.__dataclass_fields__}
        return " ".join(f"{k} {v[at]:,.10g}" for k, v in sizes.items() if isinstance(v, np.ndarray) and v.ndim == 1)


GPUS = {
    **{name: name for name in gpus()},
    **{name.replace("-", "_"): name for name in gpus()},
    "v100": "v100-sxm2-16",
    "a100": "a100-sxm-80",
    "a100_pcie": "a100-pcie-80",
    "h100": "h100-sxm",
    "h800": "h800-sxm",
    "h200": "h200-sxm",
    "b200": "b200-sxm",
    "gb200": "gb200",
    "b300": "b300-sxm",
    "gb300": "gb300",
    "l40s": "l40s",
}
"""Names in the catalog, by those in tables: the catalog's own, and shorter ones."""

DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "fp8": "fp8", "fp8_block": "fp8"}
"""Number formats, by their names in tables."""


def refuse_format(row: Mapping[Any, Any]) -> str:
    """Returns the reason why GEMMs of the GPU and number format of a row cannot be priced, "" if they can."""
    if row["gpu"] not in GPUS:
        return f"the GPU {row['gpu']} is not known"
    if row["dtype"] not in DTYPES:
        return f"the number format {row['dtype']} is not known"
    known = DTYPES[row["dtype"]] in load("gpus", GPUS[row["gpu"]]).peak
    return "" if known else f"{row['gpu']} has no peak rate in {DTYPES[row['dtype']]}"


def describe_cell(figure: float) -> str:
    """Returns what a cell of a table holds, for a sentence that says why its row is refused."""
    return "is empty" if np.isnan(figure) else f"is {figure:g}"
