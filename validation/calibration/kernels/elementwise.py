"""Reads tables of memory-bound kernels: norms, activations and the like, and the kernels of BabelStream."""

from __future__ import annotations

import numpy as np
import pandas as pd

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import Memory
from meshcast.validation.calibration.kernels.sample import GPUS, KernelSample, describe_cell
from meshcast.validation.calibration.tables.rows import find_name

KERNELS = frozenset({"gpu", "op", "bytes_read", "bytes_written", "time_us", "source"})
STREAMS = frozenset({"gpu", "op", "TBps", "source"})
COLUMNS = (KERNELS, STREAMS)
OPTIONAL = frozenset({"tokens"})
"""Columns that identify the two formats."""

LIBRARIES = (
    (r"vidur", "vllm"),
    (r"trtllm|TensorRT", "tensorrt-llm"),
    (r"BabelStream", "babelstream"),
)
"""Libraries, by patterns of a row's `source`."""

WORK = {
    "norm": "norm",
    "rope": "rope",
    "gated_act": "activation",
    "gelu": "gelu",
    "residual_add": "residual",
    "embedding": "embedding",
    "amax_reduce": "amax",
    "cast_bf16_to_fp8": "cast",
}
"""Kinds of `simulator.ir.ops.Memory`, by the values of column `op`."""

ARRAY = 2**28
"""Default size of an array of BabelStream [bytes]."""
ARRAYS = {"copy": (1, 1), "mul": (1, 1), "add": (2, 1), "triad": (2, 1), "dot": (2, 0)}
"""Number of arrays that each kernel of BabelStream reads and writes."""

BLOCK_A_ROW = ("norm", "gated_act", "rope")
"""Values of column `op` whose kernels start a block for each of the `tokens` of a row."""

LARGE = 16e6
"""Traffic above which launch overhead is a small part of the time [bytes]."""


@dataclass(frozen=True)
class _Rows:
    """Rows of either format: bytes read and written, tokens, seconds, and by row the reason why it cannot be priced."""

    read: np.ndarray
    written: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    refused: dict[int, str]


def read(table: pd.DataFrame) -> tuple[list[KernelSample], dict[int, str]]:
    """Returns samples, and by row the reason why it cannot be priced."""
    table = table.reset_index(drop=True)
    rows = _kernels(table) if set(table.columns) >= KERNELS else _streams(table)
    refused = {at: f"the GPU {gpu} is not known" for at, gpu in enumerate(table["gpu"]) if gpu not in GPUS}
    refused = rows.refused | refused
    groups: dict[tuple[str, str, str], list[int]] = {}
    for at, (gpu, op, source) in enumerate(zip(table["gpu"], table["op"], table["source"], strict=True)):
        if at not in refused:
            groups.setdefault((GPUS[gpu], op, library(str(source))), []).append(at)
    samples = []
    for (gpu, op, name), group in groups.items():
        index = np.array(group)
        blocks = rows.tokens[index] if op in BLOCK_A_ROW and name == "vllm" else 0
        work = Memory(WORK.get(op, "add"), rows.read[index], rows.written[index], rows=blocks)  # type: ignore[arg-type]
        large = rows.read[index] + rows.written[index] > LARGE
        classes = {"all": np.ones(len(index), bool)} | ({"large": large} if op in ("norm", "gated_act", "gelu") else {})
        samples.append(KernelSample("memory", gpu, name, index, rows.seconds[index], op, classes, parts=(work,)))
    return samples, refused


def library(source: str) -> str:
    """Returns the library that a source measured, "" if it is unknown."""
    return find_name(LIBRARIES, source)


def _kernels(table: pd.DataFrame) -> _Rows:
    read, written, micro = (_numbers(table, name) for name in ("bytes_read", "bytes_written", "time_us"))
    refused = {}
    for at, op in enumerate(table["op"]):
        if op not in WORK:
            refused[at] = f"the operation {op} is not known"
        elif not (read[at] >= 0 and written[at] >= 0 and 0 < read[at] + written[at] < np.inf):
            cells = f"bytes_read {describe_cell(read[at])}, bytes_written {describe_cell(written[at])}"
            refused[at] = f"{cells}: no bytes of a kernel"
        elif not 0 < micro[at] < np.inf:
            refused[at] = f"time_us {describe_cell(micro[at])}, which is no time"
    tokens = np.nan_to_num(_numbers(table, "tokens")) if "tokens" in table else 0 * read
    return _Rows(read, written, tokens, micro * 1e-6, refused)


def _streams(table: pd.DataFrame) -> _Rows:
    rate = _numbers(table, "TBps") * 1e12
    moved = np.array([ARRAYS.get(op, (0, 0)) for op in table["op"]], float).reshape(len(table), 2) * ARRAY
    refused = {}
    for at, op in enumerate(table["op"]):
        if op not in ARRAYS:
            refused[at] = f"the stream {op} is not known"
        elif not 0 < rate[at] < np.inf:
            refused[at] = f"TBps {describe_cell(rate[at] / 1e12)}, which is no rate"
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Rows(moved[:, 0], moved[:, 1], 0 * rate, moved.sum(axis=1) / rate, refused)


def _numbers(table: pd.DataFrame, name: str) -> np.ndarray:
    return pd.to_numeric(table[name], errors="coerce").to_numpy(float)
