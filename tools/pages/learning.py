"""Writes docs/learning.md and the prior of steps: what learning from measured steps does to forecasts of others.

``python -m tools.pages.learning RUNS.jsonl [MORE.jsonl ...] docs/learning.md`` (``make docs-learning RUNS=...``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from textwrap import wrap

import yaml

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.render.terminal.learning import (
    describe_draws,
    errors_table,
    intervals_table,
    validate_learning,
)
from meshcast.experiments.views.table import Table, numbers
from meshcast.hardware.documents.output_file import write_file
from meshcast.simulator.costs.step_posterior import CERTAIN, CONFIRMED, FILE, ROOM
from meshcast.validation.calibration.write import round_digits
from meshcast.validation.published.answer import Answer

HEAD = """\
# Standard deviations of log(measured / forecast) of steps of a source that nobody here knows. Made by
# `make docs-learning`; do not edit it. validation/learning/step_prior.py says how.
"""

PAGE = """\
# Learning from measured steps

Made by `make docs-learning` from files of published runs; `meshcast validate learning RUNS.jsonl` prints the same.
[calibration.md](calibration.md#learn-from-measured-steps) says how to learn from your own runs.

## What is tried

Some steps of a source are learnt from, its others are forecast, {trials} draws of every source and number. A source is
left out of everything that its steps could have set: of the coefficients that were fitted to published steps and of the
prior below. Its runs are told [as a stranger would](published-runs.md#as-a-stranger), with flags hidden. What remains
known: kernels and links from tables, and what code and documents of its program say, which was read while its runs were
looked at.

Median error of the steps that were not learnt from [%], by the number of those that were, and the ratio of 5 to 0;
*whole*: this ratio if corrections were not shortened by what is not certain:

{errors}

In the median of these sources 5 steps leave {five:.0%} of the error ({whole:.0%} without shortening, which hurts too
often){twenty}. Sources whose steps are all off in the same way gain from a few
steps; where every step is off in its own way, as many are needed as there are ways.

## Whether learning hurts

{draws}

Corrections are shortened by {certain} standard deviations, or by {confirmed} where steps held back were forecast better
than without (a paired t-test at 97.5 %): that is why few steps change little. These two numbers were chosen with draws
of all these sources in view; the prior was not.

## Intervals

Shares of the steps that were not learnt from in their 90 % interval, and half of its width, in logarithms:

{intervals}

## The prior

Standard deviations of the logarithm of a factor on a kind of work; of what the steps of a `source`, those of a `model`
on a GPU, and those with `like` sizes have in common (`length`: distance in logarithms of sizes); scale of the `noise`
of a step.

{prior}
"""


def describe_learning(answer: Answer) -> str:
    """Returns the page."""
    prior = Table("of", *numbers("value", format=".3g"))
    for name, value in answer["prior"].items():
        prior.add(name, value)
    return PAGE.format(
        trials=answer["trials"],
        errors=render_table(errors_table(answer)).rstrip(),
        five=find_ratio(answer, "5"),
        whole=find_ratio(answer, "5", "not_shortened"),
        twenty=f", 20 leave {find_ratio(answer, '20'):.0%} of that of their sources" if 20 in answer["counts"] else "",
        draws="\n".join(wrap(f"{describe_draws(answer).capitalize()}.", 119)),
        certain=CERTAIN,
        confirmed=CONFIRMED,
        intervals=render_table(intervals_table(answer)).rstrip(),
        prior=render_table(prior).rstrip(),
    )


def find_ratio(answer: Answer, count: str, kind: str = "errors") -> float:
    """Returns the median over sources of the error after learning from so many steps over that without."""
    return median(row[kind][count] / row["errors"]["0"] for row in answer["sources"] if count in row["errors"])


def write_prior(answer: Answer, file: Path) -> None:
    """Writes the prior that ships."""
    prior = {name: round_digits(value, 3) for name, value in answer["prior"].items()}
    write_file(file, HEAD + yaml.safe_dump(prior, default_flow_style=None, sort_keys=False, width=200))


def main(paths: Sequence[str]) -> None:
    """Reads files of published runs, and writes the prior and the page."""
    *runs, page = map(Path, paths)
    answer, _ = validate_learning(runs)
    write_prior(answer, Path(str(ROOM / FILE)))
    write_file(page, describe_learning(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
