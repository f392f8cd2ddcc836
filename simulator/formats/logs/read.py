"""Reads a training log of any of the programs in `LOG_FORMATS`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.files import lines
from meshcast.simulator.formats.logs.deepspeed import DeepspeedLog
from meshcast.simulator.formats.logs.events import EventReader
from meshcast.simulator.formats.logs.megatron import MegatronLog
from meshcast.simulator.formats.logs.nanotron import NanotronLog
from meshcast.simulator.formats.logs.nemo import NemoLog
from meshcast.simulator.formats.logs.rank_times import RankTimesReader
from meshcast.simulator.formats.logs.torchtitan import TorchtitanLog
from meshcast.simulator.formats.logs.trainer import TrainerLog, thin_bars
from meshcast.simulator.formats.logs.training_log import Iteration, LogFormat, TrainingLog

LOG_FORMATS: dict[str, LogFormat] = {
    form.name: form for form in (MegatronLog(), NemoLog(), TorchtitanLog(), NanotronLog(), DeepspeedLog(), TrainerLog())
}
"""Formats by name, in the order of preference: programs print the lines of libraries below them, too."""

WHICH = "Name the log of a training run"


def read_log(path: Path, form: str | None = None) -> TrainingLog:
    """Reads a training log, plain or gzipped.

    form: name of its format; None: the first of `LOG_FORMATS` of which it has lines.
    Where several ranks log an iteration, the line of the slowest counts.
    Raises PlanError for a log without lines of iterations, or with incomplete ones.
    """
    rows = [(where, part) for where, row in lines(path, WHICH) for part in row.split("\r")]
    reader = LOG_FORMATS[form] if form is not None else _detect(rows)
    forms = reader.form if reader is not None else "`, `".join(known.form for known in LOG_FORMATS.values())
    iterations: list[Iteration] = []
    events, times = EventReader(), RankTimesReader()
    for where, row in rows if reader is not None else ():
        assert reader is not None
        iteration = reader.read_iteration(row, where) if reader.hint in row else None
        if iteration is None:
            events.read(row, where, len(iterations))
            times.read(row, where, len(iterations) - 1)
        elif iterations and iterations[-1].number == iteration.number and reader.name != TrainerLog.name:
            iterations[-1] = max(iterations[-1], iteration, key=_slowness)
        else:
            iterations.append(iteration)
    if not iterations or reader is None:
        raise PlanError(str(path), f"no line of it has the form `{forms}`", WHICH)
    if reader.name == TrainerLog.name:
        return _make_trainer_log(path, reader, iterations, events)
    return TrainingLog(
        str(path), reader.name, reader.program, tuple(iterations), tuple(events.events), tuple(times.times)
    )


def _detect(rows: Iterable[tuple[str, str]]) -> LogFormat | None:
    """Returns the first format of which a log has lines, or else lines that were cut off; None: it has none of any."""
    whole, cut = set(), set()
    for where, row in rows:
        for name, reader in LOG_FORMATS.items():
            try:
                if reader.hint in row and name not in whole and reader.read_iteration(row, where) is not None:
                    whole.add(name)
            except PlanError:
                cut.add(name)
        if next(iter(LOG_FORMATS)) in whole:
            break
    return next((LOG_FORMATS[name] for names in (whole, cut) for name in LOG_FORMATS if name in names), None)


def _make_trainer_log(path: Path, reader: LogFormat, bars: list[Iteration], events: EventReader) -> TrainingLog:
    """Returns the log of a progress bar: bars that are far enough apart, and events between these."""
    kept = thin_bars(bars)
    if len(kept) < 2:
        raise PlanError(str(path), "its progress bar tells of less than ten seconds", "Name the log of a longer run")
    moved = [
        replace(event, before=next((i for i, (index, _) in enumerate(kept) if index >= event.before), len(kept)))
        for event in events.events
    ]
    return TrainingLog(str(path), reader.name, reader.program, tuple(bar for _, bar in kept), tuple(moved))


def _slowness(iteration: Iteration) -> tuple[float, float, float]:
    """Returns what is largest for the slowest of several ranks."""
    return iteration.seconds or 0.0, -(iteration.tokens_per_s or 0.0), -(iteration.samples_per_s or 0.0)
