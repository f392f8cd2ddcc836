"""A forecast replayed: op by op as SimPy processes, which is the reference, and on every rank by itself.

Compared with SimPy are the step, where the time of every device goes, and when every op begins and ends. Compared with
the ranks are the step, and when every op ends on the last rank of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.per_rank import Pace, unfold
from meshcast.simulator.engine.play import ByOps, PlayedStep, play_on_simpy
from meshcast.simulator.report.breakdown import breakdown
from meshcast.simulator.report.forecast import Forecast
from meshcast.simulator.report.formatting import format_seconds, name_device
from meshcast.simulator.report.report import Report

CLOSE = 1e-9
"""Share of a step by which figures may differ that are equal but for rounding."""

PAUSES = 200
"""Number of moments of a step at which the progress on SimPy is shown."""

Track = Callable[[Iterable[Any], str], Iterable[Any]]
"""Passes items on singly and shows how many of them are done, under a label."""


def track_silently(items: Iterable[Any], label: str) -> Iterable[Any]:
    """Passes items on and shows nothing."""
    return items


@dataclass(frozen=True)
class Replay:
    """A forecast held against a replay of the same step.

    engine: what played it, in words.
    step_time_s: duration of the replayed step [s].
    forecast_s: that of the forecast [s].
    figures: number of figures that were compared.
    difference: the largest difference of two of them [share of the step].
    place: which figure that is.
    """

    engine: str
    step_time_s: float
    forecast_s: float
    figures: int
    difference: float
    place: str

    @property
    def agrees(self) -> bool:
        """Whether all figures are equal but for rounding."""
        return self.difference <= CLOSE

    def __str__(self) -> str:
        largest = f"the largest difference of {self.figures:,} figures is {self.difference:.1e} of the step"
        if self.agrees:
            return f"{self.engine}: the same step, {format_seconds(self.step_time_s)}; {largest}"
        return f"{self.engine}: {self.step_time_s!r} s, the forecast is {self.forecast_s!r} s; {largest}: {self.place}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the replay as in the JSON answers of ``predict --verify`` and ``check``."""
        return asdict(self) | {"agrees": self.agrees}


class Figures(NamedTuple):
    """Figures of a forecast and of its replay, in the same order [s]. name: what the figure at an index is."""

    forecast: Sequence[float]
    replay: Sequence[float]
    name: Callable[[int], str]


def replay(report: Report, track: Track = track_silently) -> tuple[Report, tuple[Replay, Replay]]:
    """Replays a forecast on SimPy and on every rank; returns SimPy's report, and how the forecast differs from both.

    Raises PlanError for a step of too many ops.
    """
    on_simpy, simpy = replay_on_simpy(report, track)
    return on_simpy, (simpy, replay_on_ranks(report, track))


def replay_on_simpy(report: Report, track: Track = track_silently) -> tuple[Report, Replay]:
    """Plays a forecast again on SimPy; returns the report of what SimPy's processes did, and how the forecast differs.

    Raises PlanError for a step of too many ops.
    """

    def play(step: PlayedStep) -> PlayedStep:
        moments = np.linspace(0.0, step.span, PAUSES + 1)[1:].tolist()
        return play_on_simpy(step.program, step.flat, track(moments, "playing on SimPy"))

    on_simpy = _play_again(report, [play(forecast.step) for forecast in _forecasts(report)])
    figures: list[Figures] = []
    for forecast, reference in zip(_forecasts(report), _forecasts(on_simpy), strict=True):
        figures += _breakdowns(forecast, reference)
        for word in ("begin", "end"):
            ours, theirs = (getattr(played.step.times, word) for played in (forecast, reference))
            figures.append(Figures(ours, theirs, _name_op(forecast, word)))
    return on_simpy, _compare("SimPy, op by op", report, on_simpy, figures)


def replay_on_ranks(report: Report, track: Track = track_silently) -> Replay:
    """Plays a forecast again on every rank by itself, all of them at the same pace; returns how the forecast differs.

    Raises PlanError for a step of too many ops.
    """
    ranks = sum(grid.ranks.size for grid in report.play.plan.ranks.grids)
    engine = f"{ranks:,} ranks, each by itself" if ranks > 1 else "the rank by itself"

    def play(forecast: Forecast) -> PlayedStep:
        step, grids = forecast.step, forecast.plan.ranks.grids
        unfolded = unfold(
            step.program,
            grids,
            Pace(),
            flat=step.flat,
            track=lambda ops: track(ops, f"playing {ranks:,} ranks"),
            ends=True,
        )
        return ByOps(step.program, step.flat, replace(step.times, end=list(unfolded.ends)))

    on_ranks = _play_again(report, [play(forecast) for forecast in _forecasts(report)])
    figures = [
        Figures(forecast.step.times.end, played.step.times.end, _name_op(forecast, "end"))
        for forecast, played in zip(_forecasts(report), _forecasts(on_ranks), strict=True)
    ]
    return _compare(engine, report, on_ranks, figures)


def describe_disagreement(replays: Iterable[Replay]) -> str:
    """Returns the first replay that differs from its forecast, in words; empty if none does."""
    return next((str(played) for played in replays if not played.agrees), "")


def _forecasts(report: Report) -> list[Forecast]:
    """Returns the steps of all kinds of a report."""
    return [forecast for _, forecast in report.step_kinds] or [report.play]


def _play_again(report: Report, steps: Sequence[PlayedStep]) -> Report:
    """Returns the report of the same forecasts with their steps as they were played again."""
    forecasts = [replace(forecast, step=step) for forecast, step in zip(_forecasts(report), steps, strict=True)]
    shown = next(i for i, forecast in enumerate(_forecasts(report)) if forecast is report.play)
    shares = [share for share, _ in report.step_kinds]
    again = Report(forecasts[shown], list(zip(shares, forecasts, strict=False)))
    again.correction = report.correction
    return again


def _breakdowns(forecast: Forecast, reference: Forecast) -> Iterator[Figures]:
    """Yields the parts of the step on every device."""
    for device in range(forecast.program.devices):
        ours, theirs = (
            breakdown(play.program, play.seconds, play.occupancy(device), device, play.sums).parts
            for play in (forecast, reference)
        )
        names = [f"{part} on {name_device(forecast.plan, device)}" for part in ours]
        yield Figures([*ours.values()], [*theirs.values()], names.__getitem__)


def _name_op(forecast: Forecast, word: str) -> Callable[[int], str]:
    """Returns what names the begin or end of an op by its number."""
    flat, plan = forecast.step.flat, forecast.plan
    return lambda number: f"the {word} of {flat.ops[number].name} on {name_device(plan, flat.device[number])}"


def _compare(engine: str, report: Report, replayed: Report, figures: Iterable[Figures]) -> Replay:
    """Finds the largest difference of all figures."""
    step, again = report.step_time, replayed.step_time
    count, gaps, places = 0, [], []
    for forecast, other, name in (Figures([step], [again], lambda _: "the step"), *figures):
        if len(forecast):
            gap = np.abs(np.subtract(other, forecast)) / step
            count += len(gap)
            gaps.append(float(gap.max()))
            places.append(name(int(gap.argmax())))
    at = int(np.argmax(gaps))  # what is no number counts as the largest
    return Replay(engine, again, step, count, gaps[at], places[at])
