"""Reads tables of measurements: finds the reader of a file by its columns, compares each row with its forecast."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.metrics import Z90
from meshcast.validation.calibration.tables.rows import Rows, SampleComparison
from meshcast.validation.calibration.tables.sheet import BLANK, CsvSheet, sheet

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
    "DeepEP hybrid-ep": "deepseek-ai/DeepEP @94a9f8f (branch hybrid-ep), docs/README_Hybrid-EP.md",
    "DeepEP": "deepseek-ai/DeepEP @dd758caf4518",
    "deepseek-ai": "deepseek-ai/profile-data @449602428a1b",
    "vTrain": "VIA-Research/vTrain @f8dda8473a48, trace",
    "BabelStream": "Azure/AI-benchmarking-guide @8fd0c6e1bd0f",
}
"""Publications of measurements, by the prefix of a row's `source`."""

MAX_REASON = 160
"""Maximum length of a reason [characters]; a reason may quote a row."""


class Reader(Protocol):
    """A module that reads some formats of tables.

    Attributes:
        COLUMNS: for each format the columns that identify it. A module may also have OPTIONAL: further columns that it
            reads where a table has them.
    """

    COLUMNS: tuple[frozenset[str], ...]

    @staticmethod
    def read(table: pd.DataFrame) -> tuple[list[Any], dict[int, str]]:
        """Returns samples, and by row (from 0) the reason why no cost model can price it."""


@dataclass(frozen=True)
class LibraryTable:
    """A file of measurements.

    Attributes:
        path: of the file.
        frame: the columns `source` and `time_us` of the file.
        samples: of its rows.
        refused: by row (from 0), the reason why no cost model can price it.
    """

    path: Path
    frame: pd.DataFrame
    samples: list[Any]
    refused: dict[int, str] = field(default_factory=dict)

    def source(self, sample: Rows) -> str:
        """Names the publications from which a sample's rows come."""
        if "source" not in self.frame:
            return self.path.name
        stated = dict.fromkeys(self.frame["source"].iloc[sample.index].astype(str))
        return "; ".join(dict.fromkeys(expand_source(source) for source in stated if source)) or self.path.name

    def answers(self, held: Sequence[SampleComparison]) -> list[dict[str, Any]]:
        """Returns for each row, in file order, its forecast, 90 % interval, measured time and error (forecast
        / measured - 1), or the reason why it has none. held: the samples with their forecasts.
        """
        measured = _times(self.frame)
        rows: list[dict[str, Any]] = [
            {
                "file": str(self.path),
                "line": at + 1,
                "status": "refused",
                "reason": self.refused.get(at, "no cost model prices it"),
                "predicted_us": None,
                "interval_90_us": None,
                "measured_us": measured[at],
                "error": None,
            }
            for at in range(len(self.frame))
        ]
        for comparison in held:
            sample, micro = comparison.sample, comparison.priced.seconds * 1e6
            room = np.exp(Z90 * comparison.priced.sigma)
            columns = sample.index, micro, micro / room, micro * room, comparison.errors, sample.seconds * 1e6
            for at, value, low, high, error, took in zip(*(column.tolist() for column in columns), strict=True):
                stated = {"predicted_us": value, "interval_90_us": [low, high], "error": error}
                # Tables of rates have no time column: times are computed from the rates.
                stated["measured_us"] = took if measured[at] is None else measured[at]
                rows[at].update(status="predicted", reason=None, **stated)
        return rows


def _times(frame: pd.DataFrame) -> list[float | None]:
    """Returns the measured times of rows [us], None where a row has none."""
    if "time_us" not in frame:
        return [None] * len(frame)
    values = pd.to_numeric(frame["time_us"], errors="coerce").tolist()
    return [value if math.isfinite(value) else None for value in values]


def expand_source(source: str) -> str:
    """Expands the tag at the start of a row's `source` to the repository or paper that it stands for."""
    tag = next((tag for tag in SOURCES if source.startswith(tag)), "")
    return f"{SOURCES[tag]}: {source.removeprefix(tag).strip()}" if tag else source


def read(path: Path, readers: Sequence[Reader]) -> LibraryTable:
    """Reads the measurements of a .csv or .csv.gz file.

    Raises PlanError for a file that cannot be read, and for a table whose columns are of no known format.
    """
    stated = sheet(path)
    # No format requires a file to have `source`.
    columns = {*stated.columns, "source"}
    fitting = [(len(form), i, form) for i, reader in enumerate(readers) for form in reader.COLUMNS if form <= columns]
    if not fitting:
        remedy = _nearest(columns, readers)
        if path.suffix.lower() in (".txt", ".log", ".out"):
            remedy = f"The output of nccl-tests is converted by meshcast import nccl-tests {path}. {remedy}"
        raise PlanError("--data", "no format of measurements has these columns", remedy, str(path))
    forms = [(form, readers[i]) for _, i, form in sorted(fitting, key=lambda fit: fit[:2], reverse=True)]
    samples: list[Any] = []
    refused: dict[int, str] = {}
    for form, rows in _by_form(stated, forms).items():
        more, why = _read(stated, *forms[form], np.array(rows, int))
        samples += more
        refused |= why
    frame = stated.frame(("source", "time_us"), ())[0]
    reasons = {at: textwrap.shorten(reason, MAX_REASON) for at, reason in refused.items()}
    return LibraryTable(path, frame, samples, reasons)


def _by_form(stated: CsvSheet, forms: Sequence[tuple[frozenset[str], Reader]]) -> dict[int, list[int]]:
    """Groups the rows of a table by format, as indices into `forms` (largest format first).

    A row belongs to the largest format all of whose columns it fills. A row that fills only some of the columns which a
    larger format adds does not belong to the smaller format: it lacks values. Rows of no format go to the largest,
    which refuses them.
    """
    if len(forms) == 1:
        return {0: list(range(len(stated.rows)))}
    every = frozenset().union(*(form for form, _ in forms))
    groups: dict[int, list[int]] = {}
    for at, filled_columns in enumerate(stated.filled_columns(every)):
        partly = [
            form for form, _ in forms if any(form < other and filled_columns & (other - form) for other, _ in forms)
        ]
        fitting = (i for i, (form, _) in enumerate(forms) if form - BLANK <= filled_columns and form not in partly)
        groups.setdefault(next(fitting, 0), []).append(at)
    return groups


def _read(stated: CsvSheet, form: frozenset[str], reader: Reader, rows: np.ndarray) -> tuple[list[Any], dict[int, str]]:
    """Reads the rows of a format: samples, and by row the reason of its refusal."""
    frame, faults = stated.frame(form | getattr(reader, "OPTIONAL", frozenset()) | {"source"}, form)
    faults = {at: faults[at] for at in rows.tolist() if at in faults}
    good = np.array([at for at in rows.tolist() if at not in faults], int)
    if not len(good):
        return [], faults
    stated_rows = frame if "source" in frame else frame.assign(source="")
    samples, refused = reader.read(stated_rows.iloc[good])
    samples = [replace(sample, index=good[sample.index]) for sample in samples]
    return samples, faults | {int(good[at]): reason for at, reason in refused.items()}


def _nearest(columns: set[str], readers: Sequence[Reader]) -> str:
    """Says which columns the closest format still lacks, or lists all formats."""
    known = [form for reader in readers for form in reader.COLUMNS]
    best = max(known, key=lambda form: len(form & columns) / len(form))
    listed = ", ".join(sorted(best - columns))
    if len(best & columns) > len(best) / 2:
        return f"The closest format has the columns {', '.join(sorted(best))}: add {listed}"
    return "Formats, by their columns: " + "; or ".join(", ".join(sorted(form)) for form in known)
