"""Refuses a run that is not expected to end, before it is simulated: what has to pass, and what would end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.formatting import format_days, format_seconds
from meshcast.simulator.runs.checkpoints import best_interval
from meshcast.simulator.runs.expected_run import ExpectedRun, FailureTimes, expect_run, measure_pauses
from meshcast.simulator.runs.failures import FailingUnits
from meshcast.simulator.runs.span import CheckpointTier
from meshcast.simulator.runs.training import RunSetting

RARER = (2, 5, 10, 20, 50, 100, 1_000, 10_000, 100_000, 1_000_000)
"""Factors on times between failures that are tried for a remedy."""

MANY = 1_000_000
"""Attempts and days above which their number says nothing more."""


def refuse_endless(setting: RunSetting) -> None:
    """Raises PlanError for a run that is expected to be given up (`RunSetting.limit_s`, `most_events`)."""
    times = FailureTimes(setting.sources)
    expected = expect_run(setting, times)
    if not expected.ends(setting):
        raise _explain(setting, expected, times)


def _explain(setting: RunSetting, expected: ExpectedRun, times: FailureTimes) -> PlanError:
    """The error for a run that does not end."""
    limit = f"given up after {_describe(setting.limit_s)}, run.most_days"
    if (paused := measure_pauses(setting)) >= 1:
        of_data = tuple(episode for episode in setting.episodes if episode.data)
        stalls = measure_pauses(replace(setting, episodes=of_data))
        where = "run.data_stalls" if stalls > paused / 2 else "run.stragglers.episodes"
        rule = f"the run never goes on: its pauses are {paused:,.3g} times as long as the time between them"
        return PlanError(where, rule, "State shorter or rarer ones; every_hours of an episode is that of one part")
    if expected.seconds <= setting.limit_s and (expected.attempts < 2 or setting.horizon < math.inf):
        rule = f"some {expected.events:,.3g} events are expected, and a run is given up after {setting.most_events:,}"
        remedy = "State rarer failures and slow episodes (their hours are those of one part), or raise it"
        return PlanError("run.most_events", rule, remedy)
    finite = math.isfinite(expected.seconds)
    if finite and expected.waiting > expected.seconds / 2:
        rule = (
            f"the run never ends: of {_describe(expected.seconds)} it waits {_describe(expected.waiting)} for repairs "
            f"({limit})"
        )
        return PlanError("run.recovery.spares", rule, _advise(setting, times), setting.spares)
    attempt = expected.attempt
    where = "run.recovery" if attempt.recovery > attempt.segment + attempt.write else "run.checkpoints"
    attempts = f"{round(expected.attempts):,}" if expected.attempts < MANY else f"more than {MANY:,}"
    rule = (
        f"the run never ends: from a failure to the next checkpoint {_describe(attempt.need)} have to pass without "
        f"another one, and one comes every {_describe(expected.mtbf)}: {attempts} attempts for each"
        + (f", and {_describe(expected.seconds)} in all ({limit})" if finite else "")
    )
    return PlanError(where, rule, _advise(setting, times))


def _advise(setting: RunSetting, times: FailureTimes) -> str:
    """What would end: the least change that does."""
    for words, changed, failures in _list_changes(setting, times):
        expected = expect_run(changed, failures)
        if expected.ends(changed):
            return f"{words} would, in {_describe(expected.seconds)}"
    return "Make recovery, repairs and steps shorter, or end the run by run.days"


def _list_changes(setting: RunSetting, times: FailureTimes) -> Iterator[tuple[str, RunSetting, FailureTimes]]:
    """Changes of a run, each with its words and the times of failures then."""
    words, saved = _save_better(setting, times)
    yield words, saved, times
    if setting.spares is not None:
        nodes = max((source.nodes for source in setting.sources if isinstance(source, FailingUnits)), default=0)
        counts = [2**power for power in range(nodes.bit_length() + 1) if 2**power > setting.spares]
        yield from ((f"run.recovery.spares: {count}", replace(setting, spares=count), times) for count in counts)
        words = f"{words} and run.recovery.spares: "
        yield from ((f"{words}{count}", replace(saved, spares=count), times) for count in counts)
    for factor in RARER:
        rarer, failures = _make_rarer(setting, factor), times.stretch(factor)
        yield f"Failures {factor:,} times as rare (run.failures.mtbf_factor)", rarer, failures
        words, saved = _save_better(rarer, failures)
        yield f"{words}, and failures {factor:,} times as rare (run.failures.mtbf_factor),", saved, failures


def _save_better(setting: RunSetting, times: FailureTimes) -> tuple[str, RunSetting]:
    """The run with the best interval of its checkpoints; with some if it has none."""
    tier = next((tier for tier in setting.tiers if tier.every), None)
    if tier is None:
        return "Saving states (run.checkpoints)", replace(setting, tiers=(*setting.tiers, CheckpointTier(1)))
    step = setting.step_s * setting.jitter.mean_duration()
    interval = best_interval(tier.stall, tier.write, times.gaps().mean)
    every = max(1, round(interval / step)) if math.isfinite(interval) else tier.every
    tiers = tuple(replace(other, every=every) if other is tier else other for other in setting.tiers)
    return f"A checkpoint every {every * step:,.4g} s (run.checkpoints.every_s)", replace(setting, tiers=tiers)


def _make_rarer(setting: RunSetting, factor: float) -> RunSetting:
    """The run with failures that are so many times as rare; those of a log stay."""
    sources = (
        source._replace(mtbf=source.mtbf * factor) if isinstance(source, FailingUnits) else source
        for source in setting.sources
    )
    return replace(setting, sources=tuple(sources))


def _describe(seconds: float) -> str:
    """A time in words."""
    if seconds > MANY * 86_400:
        return f"more than {MANY:,} days"
    return format_seconds(seconds) if seconds < 7200 else format_days(seconds / 86_400)
