"""The table of the keys of a plan in docs/job.md: ``python -m tools.pages.plan_keys docs/job.md``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from meshcast.experiments.schema import docstrings
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator.job.plan_keys import PLAN_KEYS, ShortPlan

TABLE = re.compile(r"(## The plan, short\n[^|]*\|.*\n\| --- \| --- \| --- \|\n)(?:\|.*\n)+")
"""The table below its heading, and what stands before its rows."""


def write_table(page: str) -> str:
    """Returns the page with the table of `simulator.job.plan_keys`."""
    sentences = docstrings(ShortPlan)
    rows = "".join(f"| `{key.name}` | {key.words} | {sentences[key.name]} |\n" for key in PLAN_KEYS.values())
    return TABLE.sub(lambda match: match[1] + rows, page)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    write_file(file, write_table(file.read_text("utf-8")))
