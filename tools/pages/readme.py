"""Writes page and timeline of the README: ``python -m tools.pages.readme`` (``make docs-readme``)."""

from __future__ import annotations

import re
from pathlib import Path

from meshcast.experiments.pages.forecast import page, render
from meshcast.experiments.plots import timeline
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator import simulate
from tools.pages.plots import compress_image

README = Path("README.md")
EXAMPLE = "examples/llama3-70b-dgx-h100.yaml"
TIMELINE = Path("docs/images/llama3-70b-timeline.png")
BLOCK = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
"""The only block of plain text in the README."""


if __name__ == "__main__":
    report = simulate(EXAMPLE)
    printed = render(page(report))
    timeline.draw(report, TIMELINE)
    compress_image(TIMELINE)
    write_file(README, BLOCK.sub(lambda _: printed, README.read_text("utf-8")))
