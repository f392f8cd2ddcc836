"""Writes page, timeline and figures of the README: ``python -m tools.pages.readme`` (``make docs-readme``).

The figures are those of docs/accuracy.md, with all settings and as strangers are told.
"""

from __future__ import annotations

import re
from pathlib import Path

from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.experiments.render.matplotlib.timeline import timeline
from meshcast.experiments.render.terminal.forecast import page, render
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator import simulate
from tools.pages.plots import compress_image

README = Path("README.md")
EXAMPLE = "examples/llama3-70b-dgx-h100.yaml"
TIMELINE = Path("docs/images/llama3-70b-timeline.png")
BLOCK = re.compile(r"(?<=^```text\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
"""The only block of plain text in the README."""

ACCURACY = Path("docs/accuracy.md")
FIGURE = re.compile(
    r"^\| (all|dense|moe|lora) \| \d+ \| [\d./ ]+ \| ([\d.]+) / ([\d.]+) \| [^|]+ \| (\d+) \|", re.MULTILINE
)
"""Rows of the table of classes in the section on strangers: median, 90th percentile, and share inside."""
COUNTS = re.compile(r"^([\d,]+) runs, ([\d,]+) forecast, ([\d,]+) compared\.$", re.MULTILINE)
ALL = re.compile(r"^\| all \| ([\d,]+) \| ([\d.]+) \|", re.MULTILINE)
"""Row of all runs in a table: their number, and the median of their errors."""

SENTENCES = re.compile(r"^Of [\d,]+ published runs.*\nAs a stranger would be told.*$", re.MULTILINE)


def describe_accuracy(page: str) -> str:
    """Returns the sentences of the README on errors, a line each. page: docs/accuracy.md."""
    return f"{describe_runs(page)}\n{describe_strangers(page)}"


def describe_runs(page: str) -> str:
    """Returns the sentence of the README on errors of runs with all their settings. page: docs/accuracy.md."""
    ((runs, forecast, compared),) = COUNTS.findall(page)
    steps, peaks = (ALL.findall(page.partition(f"\n## {section}\n")[2])[0] for section in ("Step time", "Peak memory"))
    return (
        f"Of {runs} published runs of 17 sources, from A100 to GB300 and MI350X, {forecast} could be forecast and "
        f"{compared} compared: the median error of the step time is {steps[1]} % with all their settings; peak memory "
        f"of {peaks[0]} runs is {peaks[1]} % off."
    )


def describe_strangers(page: str) -> str:
    """Returns the sentence of the README on errors as strangers are told. page: docs/accuracy.md."""
    section = page.partition("## As a stranger would be told")[2].partition("\n| program |")[0]
    rows = {name: figures for name, *figures in FIGURE.findall(section)}
    by_class = ", ".join(
        f"{word} {rows[name][0]} / {rows[name][1]}"
        for name, word in (("dense", "dense models"), ("moe", "experts"), ("lora", "adapters"))
    )
    return (
        f"As a stranger would be told, the source of a run left out and its flags hidden: {rows['all'][0]} / "
        f"{rows['all'][1]} % (median, 90th percentile; {by_class}), and {rows['all'][2]} % inside."
    )


if __name__ == "__main__":
    report = simulate(EXAMPLE)
    printed = render(page(report))
    save(lambda: timeline(report), TIMELINE)
    compress_image(TIMELINE)
    text = BLOCK.sub(lambda _: printed, README.read_text("utf-8"))
    write_file(README, SENTENCES.sub(lambda _: describe_accuracy(ACCURACY.read_text("utf-8")), text))
