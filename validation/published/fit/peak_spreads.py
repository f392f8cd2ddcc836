"""The spread of peak memory around its forecast, on published runs that are left out.

    log(measured / forecast) ~ Student's t around 0, with a scale of its own above and below

- The scale of a side is the most likely one for the runs on it; a source counts with the root of its runs.
- A program with peaks of its own is pulled to the spread of all other programs with peaks, as if that were `PRIOR`
  further runs: so far a source that has not been seen may lie.
- A program without peaks has the spread of all programs that have some, each forecast without the coefficients of
  memory that its profile has from measurements (`fitted`); what code says stays, as any user has it.
- A program for which the profile of another stands has that of runs that were forecast so.

No scale is below `MIN_SCALE`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.framework import framework_base, framework_names, load_framework
from meshcast.simulator.report.peak_errors import FREEDOM, STRANGER, PeakError
from meshcast.validation.published.answer import Answer, map_chunks, peak_memory
from meshcast.validation.published.open_plans import Change, forecast_run
from meshcast.validation.published.rows import PublishedRun
from meshcast.validation.published.stacks import FALLBACK, framework

PRIOR = 8.0
"""Runs that the spread of all other programs counts for, as that of a source of 64 runs. Sources that are left out are
more likely with it than with less: of 184 peaks of 7 sources the logarithm of the likelihood is 46 without, 54 with 4,
56 with 8, 57 with 16."""

MIN_SCALE = 0.01
"""Least scale: peaks are printed to 1 %, and drivers keep 0.5 to 1 % of the memory of a GPU."""

GRID = np.geomspace(0.001, 2.0, 400)
"""Scales that are tried."""

OTHERS = "others"
"""Whose runs the spread of a program without peaks of its own is of."""

Peak = tuple[str, float]
"""The source of a run, and log(measured / forecast) of its peak."""


@dataclass(frozen=True)
class LeftOutPeak:
    """A published peak beside forecasts that were not fitted to it.

    id, source: of the run.
    program: the profile that stands for its program.
    log_ratio: logarithm of measured over forecast.
    unfitted: the same, without the coefficients of memory that were fitted to the program's peaks.
    stranger: the same, forecast by the profile of another program; None of `FALLBACK` itself.
    """

    id: str
    source: str
    program: str
    log_ratio: float
    unfitted: float
    stranger: float | None


def measure_peaks(runs: Sequence[PublishedRun], workers: int | None = None) -> Iterator[LeftOutPeak]:
    """Yields the peaks of all runs that print them and have a forecast."""
    printed = [run for run in runs if run.measured.peak_memory_gib is not None]
    for row in map_chunks(_measure_chunk, printed, workers):
        yield LeftOutPeak(**row)


def _measure_chunk(runs: Sequence[PublishedRun]) -> list[Answer]:
    shared = SharedWork()
    return [row for run in runs for row in _measure(run, shared)]


def _measure(run: PublishedRun, shared: SharedWork) -> Iterator[Answer]:
    """Yields the row of a run; none if it has no forecast."""
    program, printed = framework(run.spec.stack), run.measured.peak_memory_gib
    assert printed is not None

    def log_ratio(profile: str | None = None, change: Change | None = None) -> float:
        report = forecast_run(run, shared, profile, change)[1]
        return math.log(printed * GIB / peak_memory(run.spec, report))

    try:
        ratios = log_ratio(), log_ratio(change=forget_fits)
        stranger = log_ratio(FALLBACK) if run.spec.stack != FALLBACK else None
    except MeshcastError:
        return
    yield {
        "id": run.id, "source": run.source, "program": program,
        "log_ratio": ratios[0], "unfitted": ratios[1], "stranger": stranger,
    }  # fmt: skip


def forget_fits(job: Answer) -> Answer:
    """Returns a job without the coefficients of memory that its profile has from measurements."""
    stated = job["framework"]
    profile, other = load_framework(stated["name"], release=stated["release"]), load_framework(FALLBACK)
    if not any(field.partition(".")[0] == "memory" for field in profile.fitted):
        return job
    return job | {"framework": stated | {"set": stated["set"] | {"memory": other.memory.model_dump()}}}


def fit_spreads(peaks: Iterable[LeftOutPeak], prior: float = PRIOR) -> dict[str, PeakError]:
    """Returns the distribution of every framework profile, and that of a program for which that of another stands.

    peaks: of `FALLBACK` and of others.
    """
    rows = [*peaks]
    of_programs = {}
    for program in sorted({row.program for row in rows}):
        of_program, others = (
            [(row.source, row.log_ratio) for row in rows if (row.program == program) is wanted]
            for wanted in (True, False)
        )
        of_programs[program] = _make_error(of_program, program, others, prior)
    any_other = _make_error([(row.source, row.unfitted) for row in rows])
    strangers = [(row.source, row.stranger) for row in rows if row.stranger is not None]
    nearest = {name: _nearest_with_peaks(name, of_programs) for name in framework_names()}
    errors = {name: of_programs[near] if near is not None else any_other for name, near in nearest.items()}
    return errors | {STRANGER: _make_error(strangers)}


def _nearest_with_peaks(profile: str, known: Container[str]) -> str | None:
    """Returns the profile itself or the nearest of its bases that has peaks; None without any, and of a profile that
    is a relative of none (`regime`: unknown)."""
    name: str | None = profile
    while name is not None and name not in known:
        name = framework_base(name) if load_framework(profile).regime != "unknown" else None
    return name


def _make_error(
    peaks: Sequence[Peak], program: str = OTHERS, others: Sequence[Peak] = (), prior: float = 0.0
) -> PeakError:
    """Returns the distribution of the peaks of a program, pulled to the scales of those of all others."""
    weight = float(_weights(peaks).sum())
    below, above = (
        max(
            MIN_SCALE,
            math.sqrt((weight * _side(peaks, sign) ** 2 + prior * _side(others, sign) ** 2) / (weight + prior)),
        )
        for sign in (-1, 1)
    )
    return PeakError(round(below, 4), round(above, 4), len(peaks), len({source for source, _ in peaks}), program)


def _side(peaks: Sequence[Peak], sign: int) -> float:
    """Returns the most likely scale of the peaks below (-1) or above (1) their forecast; 0 if there are none."""
    reaches = sign * np.array([ratio for _, ratio in peaks])
    weights = _weights(peaks)[reaches > 0]
    if not len(weights):
        return 0.0
    terms = np.log(GRID) + (FREEDOM + 1) / 2 * np.log1p((reaches[reaches > 0, None] / GRID) ** 2 / FREEDOM)
    return float(GRID[np.argmin(weights @ terms)])


def _weights(peaks: Sequence[Peak]) -> np.ndarray:
    """Returns the weights of peaks: those of a source add up to the root of their number."""
    number = Counter(source for source, _ in peaks)
    return np.array([number[source] ** -0.5 for source, _ in peaks])
