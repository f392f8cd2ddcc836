"""The table of figures as a page of docs: ``python -m tools.pages.figures docs/figures.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Table
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator.report.figures import FIGURES, Figure

HEAD = """# Figures

Made by `make docs-figures` from the table in `simulator/report/figures.py`; do not edit it. These are the figures of a
forecast: `predict --json` and `Report.to_dict()` have them at the place that the third column names
([the rest of the answer](job.md#the-answer)), a sweep has a column of each ([sweeps.md](sweeps.md#the-columns)), and
`meshcast plot --value` draws every column of which lower or higher is better. A new one takes one entry:
[add-a-figure.md](add-a-figure.md). GiB are 2^30 bytes.

"""


def page() -> str:
    """Returns the whole page."""
    heads = ("figure", "unit", "in the answer", "better", "what it is")
    return HEAD + render_table(Table(*heads, rows=map(_list_cells, FIGURES.values())))


def _list_cells(figure: Figure) -> tuple[str, ...]:
    better = "" if figure.better == "neither" else figure.better
    place = re.sub(r"\.(\d+)", r"[\1]", figure.where)
    notes = [f"where the job has `{figure.needs}`"] if figure.needs else []
    notes += [] if figure.column else ["no column in sweeps"]
    sentence = figure.sentence + (f" ({', '.join(notes)})" if notes else "")
    return f"`{figure.name}`", figure.unit, f"`{place}`", better, sentence


if __name__ == "__main__":
    write_file(Path(sys.argv[1]), page())
