"""Writes the spread of peak memory of every program, from files of published runs: simulator/report/peak_errors.yaml.

python -m tools.data.peak_errors runs.jsonl more.jsonl
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Table, numbers
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator.report.peak_errors import FILE, FITS, ROOM, PeakError
from meshcast.validation.published.fit.peak_spreads import LeftOutPeak, fit_spreads, measure_peaks
from meshcast.validation.published.rows import PublishedRun, read_files

HEAD = """\
# Scales of log(measured / forecast) of the peak memory below and above the forecast, by framework profile. Made by
# `make docs-peak-errors`; do not edit it. `rows` published peaks of `sources` sources, of `program`: of the profile
# itself, of its base, or of all others; validation/published/fit/peak_spreads.py says how.
"""


def write_table(spreads: Mapping[str, PeakError], file: Path) -> None:
    """Writes the table."""
    lines = (yaml.safe_dump({name: asdict(spreads[name])}, default_flow_style=None, width=200) for name in spreads)
    write_file(file, HEAD + "".join(lines))


def describe_left_out(peaks: Sequence[LeftOutPeak]) -> str:
    """Returns how the peaks of every source lie in what all others say, as a page in Markdown."""
    table = Table("source", "program", *numbers("peaks"), *numbers("inside 90 %", "below the 95 % end", format=".0%"))
    for source in sorted({peak.source for peak in peaks}):
        of_source = [peak for peak in peaks if peak.source == source]
        spreads = fit_spreads(peak for peak in peaks if peak.source != source)
        shares = [spreads[peak.program].probability(math.exp(peak.log_ratio)) for peak in of_source]
        inside, below = (sum(test) / len(of_source) for test in (
            [1 - FITS <= share <= FITS for share in shares], [share <= FITS for share in shares],
        ))  # fmt: skip
        table.add(source, of_source[0].program, len(of_source), inside, below)
    return render_table(table).rstrip()


def main(paths: Sequence[str]) -> None:
    """Reads files of published runs, writes the table, and prints how sources lie that are left out of it."""
    runs = [run for run in read_files([Path(path) for path in paths]) if isinstance(run, PublishedRun)]
    peaks = [*measure_peaks(runs)]
    write_table(fit_spreads(peaks), Path(str(ROOM / FILE)))
    print(describe_left_out(peaks))


if __name__ == "__main__":
    main(sys.argv[1:])
