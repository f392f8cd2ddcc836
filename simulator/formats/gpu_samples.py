"""Reads samples of GPUs that ``nvidia-smi`` has written: ``nvidia-smi dmon`` in any selection of columns, and
``nvidia-smi --query-gpu=... --format=csv`` with or without units.

The names of columns are the program's own (``nvidia-smi dmon -h``, ``nvidia-smi --help-query-gpu``)::

    # gpu    pwr  gtemp  mtemp     sm    mem   mclk   pclk
    # Idx      W      C      C      %      %    MHz    MHz
        0    643     62     88     99     41   2619   1755

    timestamp, index, clocks.current.sm [MHz], power.draw [W], temperature.gpu, clocks_event_reasons.active
    2024/04/06 02:59:36.123, 0, 1755 MHz, 643.12 W, 62, 0x0000000000000004
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import lines

WHICH = "Name what nvidia-smi dmon, or --query-gpu with --format=csv, has written"

HEAD = re.compile(r"^#(?:Date\s+Time\s+|\s*)gpu\b")
"""Head of a table of ``dmon``, with or without ``-o DT``."""

DMON = {"gpu": "gpu", "pwr": "power", "gtemp": "temperature", "temp": "temperature", "sm": "busy", "pclk": "clock"}
"""Columns of ``dmon`` that are read."""

QUERY = {
    "index": "gpu",
    "gpu": "gpu",
    "power.draw": "power",
    "power.draw.instant": "power",
    "enforced.power.limit": "limit",
    "power.limit": "limit",
    "temperature.gpu": "temperature",
    "utilization.gpu": "busy",
    "clocks.sm": "clock",
    "clocks.current.sm": "clock",
    "clocks.gr": "clock",
    "clocks.current.graphics": "clock",
    "clocks.max.sm": "highest",
    "clocks_event_reasons.active": "reasons",
    "clocks_throttle_reasons.active": "reasons",
}
"""Columns of ``--query-gpu`` that are read."""

REASONS = {
    "hw_slowdown": 0x8,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""Columns of single reasons for a lowered clock, ``Active`` or ``Not Active``, with their bits in the mask of all."""

NUMBER = re.compile(r"^[-+]?\d{1,15}(?:\.\d{1,15})?(?=\s*(?:MHz|W|C|%|MiB)?$)")


@dataclass(frozen=True)
class GPUSample:
    """A GPU at a moment.

    Attributes:
        gpu: its number on its node.
        where: file and number of the line.
        clock: of its multiprocessors [MHz].
        highest: that the clock can have [MHz].
        power: that it draws [W].
        limit: of its power [W].
        temperature: [degrees C].
        busy: share of the time in which a kernel ran, from 0 to 1.
        reasons: bits of the reasons for a lowered clock (``nvmlClocksEventReasons``).
    """

    gpu: str
    where: str
    clock: float | None = None
    highest: float | None = None
    power: float | None = None
    limit: float | None = None
    temperature: float | None = None
    busy: float | None = None
    reasons: int = 0


def holds_samples(rows: list[tuple[str, str]]) -> bool:
    """Returns whether lines of a file (`formats.files.lines`) are samples of GPUs."""
    return any(HEAD.match(row) or _query_columns(row) for _, row in rows[:50])


def read_samples(path: Path) -> list[GPUSample]:
    """Reads samples, in the order of the file. Raises PlanError for a file that has none."""
    columns: list[str] = []
    separator: str | None = None
    samples = []
    for where, row in lines(path, WHICH):
        if HEAD.match(row):
            names = row.lstrip("#").split()
            columns, separator = [DMON.get(name, "") for name in names], None
        elif named := _query_columns(row):
            columns, separator = named, ","
        elif columns and row.strip() and not row.startswith("#"):
            cells = [cell.strip() for cell in row.split(separator)]
            if len(cells) == len(columns):
                samples.append(_make_sample(dict(zip(columns, cells, strict=True)), where))
    if not samples:
        raise PlanError(str(path), "it holds no samples of GPUs", WHICH)
    return samples


def _query_columns(row: str) -> list[str]:
    """Returns what each column of a head of ``--query-gpu`` is; empty for a line that is none."""
    names = [re.sub(r"\s*\[[^\]]*\]$", "", cell.strip()) for cell in row.split(",")]
    known = [QUERY.get(name, "") for name in names]
    if len(names) < 2 or not {"clock", "power", "temperature", "busy"} & set(known):
        return []
    endings = [name.rpartition(".")[2] if "_reasons." in name else "" for name in names]
    return [column or (ending if ending in REASONS else "") for column, ending in zip(known, endings, strict=True)]


def _make_sample(cells: Mapping[str, str], where: str) -> GPUSample:
    figures = {
        name: _read_number(cells.get(name, "")) for name in ("clock", "highest", "power", "limit", "temperature")
    }
    busy = _read_number(cells.get("busy", ""))
    mask = cells.get("reasons", "")
    reasons = int(mask, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", mask) else 0
    reasons |= sum(bit for name, bit in REASONS.items() if cells.get(name) == "Active")
    return GPUSample(cells.get("gpu", ""), where, **figures, busy=None if busy is None else busy / 100, reasons=reasons)


def _read_number(cell: str) -> float | None:
    """Reads a number with or without its unit; None for ``-`` and ``[N/A]``."""
    stated = NUMBER.match(cell)
    return float(stated[0]) if stated else None
