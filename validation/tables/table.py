"""Tables of measurements: which reader a file belongs to, what it makes of the rows, and one answer for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from hardware.errors import PlanError
from validation.tables.held import Z90, Held, Rows

SOURCES = {
    "AIC": "ai-dynamo/aiconfigurator @095f58a51c4c, systems/data",
    "vidur": "microsoft/vidur @7d47513363ec, data/profiling",
    "SimuMax": "MooreThreads/SimuMax @4dcaae513ba7, configs/system",
    "Azure": "Azure/AI-benchmarking-guide @8fd0c6e1bd0f",
    "aws-samples": "aws-samples/awsome-distributed-training @7217859f67bc, micro-benchmarks/nccl-tests",
    "coreweave": "coreweave/nccl-tests @cb86553328f8",
    "oracle-quickstart": "oracle-quickstart",
    "ml-engineering": "stas00/ml-engineering @744d01e18b79",
    "digitised": "stas00/ml-engineering @744d01e18b79, network, read off a plot",
    "flash-attention repo figure": "Dao-AILab/flash-attention @0251105a2fb1, assets",
    "FlashAttention-3 paper": "arXiv 2407.08608",
    "DeepGEMM": "deepseek-ai/DeepGEMM @327ec92",
    "DeepEP": "deepseek-ai/DeepEP @dd758caf4518",
    "deepseek-ai": "deepseek-ai/profile-data @449602428a1b",
    "vTrain": "VIA-Research/vTrain @f8dda8473a48, trace",
    "BabelStream": "Azure/AI-benchmarking-guide @8fd0c6e1bd0f",
}
"""Where measurements were published, by the first words of a row's `source`."""


class Reader(Protocol):
    """A module that reads one or more formats. COLUMNS: of each format those that tell it."""

    COLUMNS: tuple[frozenset[str], ...]

    @staticmethod
    def read(table: pd.DataFrame) -> tuple[list[Any], dict[int, str]]:
        """Samples, and the reasons of rows that no law can price, by their numbers from 0."""


@dataclass(frozen=True)
class Table:
    """A file of measurements. refused: rows, from 0, that no law can price, and why."""

    path: Path
    frame: pd.DataFrame
    samples: list[Any]
    refused: dict[int, str] = field(default_factory=dict)

    def source(self, sample: Rows) -> str:
        """Where the rows of `sample` were published."""
        if "source" not in self.frame:
            return self.path.name
        told = dict.fromkeys(self.frame["source"].iloc[sample.index].astype(str))
        return "; ".join(dict.fromkeys(published(one) for one in told))

    def answers(self, held: Sequence[Held]) -> list[dict[str, Any]]:
        """One answer for each row, in their order. held: the samples beside their forecasts."""
        measured = _times(self.frame)
        rows: list[dict[str, Any]] = [
            {
                "file": str(self.path),
                "line": at + 1,
                "status": "refused",
                "reason": self.refused.get(at, "no law prices it"),
                "predicted_us": None,
                "interval_90_us": None,
                "measured_us": measured[at],
                "error": None,
            }
            for at in range(len(self.frame))
        ]
        for one in held:
            micro, room = one.priced.seconds * 1e6, np.exp(Z90 * one.priced.spread)
            columns = one.sample.index, micro, micro / room, micro * room, one.errors
            for at, value, low, high, error in zip(*(column.tolist() for column in columns), strict=True):
                told = {"predicted_us": value, "interval_90_us": [low, high], "error": error}
                rows[at].update(status="predicted", reason=None, **told)
        return rows


def _times(frame: pd.DataFrame) -> list[float | None]:
    """The measured times [us], None where a row has none."""
    if "time_us" not in frame:
        return [None] * len(frame)
    values = pd.to_numeric(frame["time_us"], errors="coerce").tolist()
    return [value if math.isfinite(value) else None for value in values]


def published(source: str) -> str:
    """A row's `source` with the repository or paper that its tag stands for."""
    tag = next((tag for tag in SOURCES if source.startswith(tag)), "")
    return f"{SOURCES[tag]}: {source.removeprefix(tag).strip()}" if tag else source


def read(path: Path, readers: Sequence[Reader]) -> Table:
    """The measurements of a .csv or .csv.gz file.

    Raises PlanError for a file that cannot be read, and for one of no known format.
    """
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or (str(error).splitlines() or ["damaged"])[0]
        raise PlanError("--data", f"cannot be read ({reason})", "Name a CSV file with a header", str(path)) from None
    columns = set(map(str, frame.columns))
    fitting = [(len(own), i) for i, reader in enumerate(readers) for own in reader.COLUMNS if own <= columns]
    if not fitting:
        known = "; or ".join(", ".join(sorted(own)) for reader in readers for own in reader.COLUMNS)
        raise PlanError("--data", "no format of measurements has these columns", f"Known are: {known}", str(path))
    samples, refused = readers[max(fitting)[1]].read(frame)
    return Table(path, frame, samples, refused)
