"""The sections of docs/accuracy.md on memory: how likely what ran was forecast to fit, left out, and the faults."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Table, formatted_numbers, numbers
from meshcast.hardware.load import read_yaml
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.report.peak_errors import FITS, FITS_AT_ALL, PeakError, entry_of, judge
from meshcast.validation.published.answer import Answer as Row
from meshcast.validation.published.fit.peak_spreads import LeftOutPeak, fit_spreads

OUT_OF_MEMORY = resources.files("meshcast.validation.published") / "out_of_memory.yaml"

SPREADS = """\
## How far peaks lie from their forecast

Scales of log(measured / forecast) of Student's t distribution with 4 degrees of freedom, below and above the forecast
([how they are fitted](published-runs.md#the-spread-of-peaks)); *least room* is the memory of a GPU over the need that
is forecast, with which a plan fits with 95 %. *Inside* is the share of the peaks of a program in the 90 % interval of
a spread that was fitted without their source.
"""

CALIBRATION = """\
## Is a run that ran called to fit?

All published runs of which the GPU is known, each with the spread of its program without the source of the run. All of
them ran, so a decile can only say how many there are; reports of runs that were out of memory
([which](#reports-of-runs-out-of-memory)) stand beside them.
"""

FAULTS = """\
## Runs that ran and are forecast not to fit

Forecast to fit with less than 50 %. What a run does not state and its memory contradicts has its next likely value
before it is listed here ([how](published-runs.md#runs-that-do-not-fit)).
"""

CAUSES = {
    "llama3-405b": "Meta's own program: it reduces gradients in every micro-batch (with that 81 GiB, 48 %), frees "
    "outputs of stages early, and its order of micro-batches is not that of interleaved 1F1B (arXiv 2407.21783, "
    "sections 3.3.2 and 3.3.4)",
    "deepseek-v3-n2048": "DeepSeek's own program: inputs of activations in 8 bits and moments in bf16 (arXiv "
    "2412.19437, section 3.3.3), neither of which Megatron-Core's profile has: with both 78 GiB and 54 %",
}
"""Causes of faults in words, by ids of runs; regular expressions."""


def list_sections(rows: Sequence[Row], peaks: Sequence[LeftOutPeak], reported: Sequence[Row]) -> list[str]:
    """Returns the sections.

    rows: answers, as ``validate published --json`` lists them.
    peaks: of the same runs.
    reported: of runs that were out of memory, each with `id`, `source`, `reported`, `spread` and `room`.
    """
    known = [row | row["predicted"] for row in rows if row["predicted"]]
    left_out = LeftOutSpreads(peaks)
    return [
        f"{SPREADS}\n{_list_spreads(peaks, left_out)}",
        f"{CALIBRATION}\n{_calibrate(known, reported, left_out)}",
        f"## Reports of runs out of memory\n\n{_list_reported(reported, left_out)}",
        f"{FAULTS}\n{_list_faults(known, left_out)}",
    ]


def forecast_reported() -> Iterator[Row]:
    """Yields the runs that were out of memory by reports (`OUT_OF_MEMORY`), with their forecasts."""
    for entry in read_yaml(OUT_OF_MEMORY).data:
        report = simulate(entry["job"])
        framework = report.job.framework
        yield {
            "id": entry["id"],
            "source": entry["id"],
            "reported": entry["reported"],
            "spread": entry_of(framework.name, framework.regime),
            "room": report.fit.room,
        }


class LeftOutSpreads:
    """The spreads of programs without the source of a run."""

    def __init__(self, peaks: Sequence[LeftOutPeak]) -> None:
        self.sources = {peak.source for peak in peaks}
        self.every = fit_spreads(peaks)
        self.without = {
            source: fit_spreads([peak for peak in peaks if peak.source != source]) for source in self.sources
        }

    def error(self, row: Row) -> PeakError:
        """Returns the distribution for a run."""
        table: Mapping[str, PeakError] = self.without.get(row["source"], self.every)
        return table[row["spread"]]

    def probability(self, row: Row) -> float:
        """Returns the probability that a run fits."""
        return self.error(row).probability(row["room"])


def _list_spreads(peaks: Sequence[LeftOutPeak], left_out: LeftOutSpreads) -> str:
    figures = ("below", ".3f"), ("above", ".3f"), ("least room", ".2f"), ("inside %", ".0p")
    table = Table("profile", *numbers("peaks", "sources"), "of", *formatted_numbers(*figures))
    for name, error in sorted(left_out.every.items()):
        of_program = [peak for peak in peaks if peak.program == name]
        inside = [
            abs(left_out.without[peak.source][name].share(peak.log_ratio) - 0.5) <= FITS - 0.5 for peak in of_program
        ]
        share = sum(inside) / len(inside) if inside else None
        table.add(name, error.rows, error.sources, error.program, error.below, error.above, error.ratio(FITS), share)
    return render_table(table)


def _calibrate(rows: Sequence[Row], reported: Sequence[Row], left_out: LeftOutSpreads) -> str:
    ran, failed = (Counter(_decile(left_out.probability(row)) for row in some) for some in (rows, reported))
    rows_of = [(f"{10 * tenth} to {10 * tenth + 10}", ran[tenth], failed[tenth]) for tenth in reversed(range(10))]
    table = Table("forecast to fit with %", *numbers("ran", "out of memory"), rows=rows_of)
    verdicts = Counter(judge(left_out.probability(row)) for row in rows)
    shares = {name: f"{100 * verdicts[name] / len(rows):.1f} %" for name in ("fits", "tight", "does-not-fit")}
    sure = ran[9] / max(ran[9] + failed[9], 1)
    words = (
        f"Of {len(rows):,} runs that ran {shares['fits']} are called to fit ({100 * FITS:.0f} % and more), "
        f"{shares['tight']} tight, {shares['does-not-fit']} not to fit (below {100 * FITS_AT_ALL:.0f} %). Of all that "
        f"are called to fit with 90 to 100 % {100 * sure:.1f} % ran."
    )
    table.notes = [words]
    return render_table(table)


def _decile(probability: float) -> int:
    return min(int(10 * probability), 9)


def _list_reported(reported: Sequence[Row], left_out: LeftOutSpreads) -> str:
    table = Table("run", "reported by", *numbers("forecast to fit with %", format=".0p"))
    for row in reported:
        table.add(row["id"], row["reported"], left_out.probability(row))
    return render_table(table)


def _list_faults(rows: Sequence[Row], left_out: LeftOutSpreads) -> str:
    needs = formatted_numbers(("GiB", ".0f"), ("of", ".0f"), ("fits with %", ".0p"))
    faults = Table("run", *needs, "cause")
    for row in sorted(rows, key=lambda row: float(row["room"])):
        probability = left_out.probability(row)
        if probability < FITS_AT_ALL:
            cause = next((words for ids, words in CAUSES.items() if re.search(ids, row["id"])), row["misfit"])
            faults.add(f"`{row['id']}`", row["peak_device_gib"], row["capacity_gib"], probability, cause)
    faults.notes = ["Fields that runs leave open, with the value with which they fit:"]
    replaced = sorted((row["id"], *pair) for row in rows for pair in row["replaced"].items())
    fields = Table("run", "field", "value", rows=[(f"`{name}`", field, value) for name, field, value in replaced])
    return f"{render_table(faults)}\n{render_table(fields)}"
