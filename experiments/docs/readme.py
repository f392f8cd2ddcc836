"""Writes the page of the README's example: ``python -m experiments.docs.readme`` (``make docs-readme``)."""

from __future__ import annotations

import re
from pathlib import Path

from experiments.pages.forecast import page, render
from simulator import simulate

README = Path("README.md")
EXAMPLE = "examples/llama3-70b-dgx-h100.yaml"
BLOCK = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
"""The only block of plain text in the README."""


if __name__ == "__main__":
    printed = render(page(simulate(EXAMPLE)))
    README.write_text(BLOCK.sub(lambda _: printed, README.read_text("utf-8")), "utf-8")
