"""Forecasts of the points of figures, and how far they are from what was published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from statistics import median
from typing import Any

from meshcast.experiments.planning.benchmark.claimed_plans import find_claimed_plan
from meshcast.experiments.render.terminal.published import progress
from meshcast.hardware.records import dataclass
from meshcast.validation.claims.claim_file import Claim
from meshcast.validation.claims.judge import WHOLE_LIST, ReportCache, drop_unfit, find_deviation, judge
from meshcast.validation.published.answer import map_chunks
from tools.papers.figure_file import FigureFile, FigurePart

ANYWAY = (*WHOLE_LIST, "parameters", "sent_gib", "kernel_s")
"""Measures that a job has whether it fits or not: memory, counts, and times of single kernels."""


@dataclass(frozen=True)
class ForecastPoint:
    """A published number and ours.

    series, x: where it stands.
    theirs: the published number.
    low, high: ours at the ends of what the paper leaves open; equal where nothing is open. None: there is no forecast.
    reason: why there is none.
    fits: whether its jobs fit in memory; true where the number is no time of a step.
    """

    series: str
    x: float | str
    theirs: float
    low: float | None
    high: float | None
    reason: str = ""
    fits: bool = True

    @property
    def ours(self) -> float | None:
        """The middle of `low` and `high`."""
        return None if self.low is None or self.high is None else (self.low + self.high) / 2

    @property
    def deviation(self) -> float | None:
        """ours / theirs - 1; ours where theirs is 0."""
        if self.ours is None:
            return None
        return find_deviation(self.ours, self.theirs)


@dataclass(frozen=True)
class ForecastFigure:
    """A figure with the forecasts of its points, in the order of the file."""

    file: FigureFile
    points: Sequence[ForecastPoint]

    @cached_property
    def deviations(self) -> list[float]:
        """Sizes of the deviations of the points that have a forecast."""
        return [abs(point.deviation) for point in self.points if point.deviation is not None]

    @property
    def median(self) -> float | None:
        """Median size of a deviation; None if no point has a forecast."""
        return median(self.deviations) if self.deviations else None

    @property
    def largest(self) -> float | None:
        """Largest size of a deviation; None if no point has a forecast."""
        return max(self.deviations, default=None)


def forecast_figures(files: Sequence[FigureFile], workers: int | None = None) -> Iterator[ForecastFigure]:
    """Forecasts figures in order; on a terminal a progress bar follows them.

    workers: number of processes; None: as many as cores.
    """
    answers = progress(map_chunks(_forecast_chunk, files, workers, size=1), len(files), "figures")
    for file, answer in zip(files, answers, strict=True):
        yield ForecastFigure(file, answer["points"])


def _forecast_chunk(files: Sequence[FigureFile]) -> list[dict[str, Any]]:
    return [{"points": forecast_points(file.parts)} for file in files]


def forecast_points(parts: Sequence[FigurePart], cache: ReportCache | None = None) -> list[ForecastPoint]:
    """Forecasts the points of a figure."""
    cache = cache or ReportCache()
    return [_forecast_part(part, cache) for part in parts]


def _forecast_part(part: FigurePart, cache: ReportCache) -> ForecastPoint:
    claim = part.claim
    assert claim.value is not None  # read_figure takes only claims with a value
    judgement = judge(part.file, claim, find_claimed_plan, cache)
    kept = drop_unfit(claim, judgement["alternatives"])
    if not kept:
        return ForecastPoint(part.series, part.x, claim.value, None, None, judgement["reason"] or "no alternative fits")
    ours = [alternative["ours"] for alternative in kept]
    fits = _needs_no_fit(claim) or not any(alternative["does_not_fit"] for alternative in kept)
    return ForecastPoint(part.series, part.x, claim.value, min(ours), max(ours), "", fits)


def _needs_no_fit(claim: Claim) -> bool:
    """Returns whether the number of a claim is of jobs that need not fit."""
    measures = [measure or claim.measure for _, measure in claim.parsed_relation.reads]
    return all(measure.partition(".")[0] in ANYWAY for measure in measures)
