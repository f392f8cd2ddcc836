"""Published runs as a stranger would be told: flags hidden, and without anything that their own source has set.

The forecast of a run as a stranger tells it (`stranger`) lacks the coefficients that were fitted to its source alone
(`own_fits`). Those fitted to runs of many sources are fitted anew to all others, whose effect on the step is added
(`refit.corrections_without_source`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.validation.published.answer import Answer, answer, map_chunks
from meshcast.validation.published.fit.derivatives import forecast_shares
from meshcast.validation.published.fit.own_fits import forecast_stranger
from meshcast.validation.published.fit.refit import corrections_without_source
from meshcast.validation.published.rows import PublishedRun, UnreadableLine
from meshcast.validation.published.stacks import FITTED_SOURCES
from meshcast.validation.published.stranger import hidden_fields


def forecast_strangers(runs: Sequence[PublishedRun | UnreadableLine], workers: int | None = None) -> Iterator[Answer]:
    """Yields, for each run in order, the `answer` to it with its own fits of many sources, and its `row` of
    `forecast_shares`; None where its steps set no coefficient."""
    yield from map_chunks(_forecast_chunk, runs, workers)


def _forecast_chunk(runs: Sequence[PublishedRun | UnreadableLine]) -> list[Answer]:
    shared, forecasts = SharedWork(), []
    for run in runs:
        reply = answer(run, shared, forecast_stranger)
        if "job" in reply:  # the failure may have left it half made
            shared = SharedWork()
        row = None
        if isinstance(run, PublishedRun):
            reply["hidden"] = list(hidden_fields(run.spec))
            row = forecast_shares(run, shared) if run.source in FITTED_SOURCES else None
        forecasts.append({"answer": reply, "row": row})
    return forecasts


def leave_sources_out(forecasts: Sequence[Answer]) -> list[Answer]:
    """Returns the answers, each with coefficients that were fitted to the runs of all other sources.

    forecasts: of `forecast_strangers`.
    """
    rows = [forecast["row"] for forecast in forecasts if forecast["row"] and forecast["row"]["shares"] is not None]
    corrections = dict(zip((row["id"] for row in rows), corrections_without_source(rows), strict=True))
    return [_correct(forecast["answer"], corrections.get(forecast["answer"]["id"], 0.0)) for forecast in forecasts]


def _correct(reply: Answer, correction: float) -> Answer:
    """Returns an answer whose step is longer. correction: logarithm of how many times."""
    predicted, times = reply["predicted"], math.exp(correction)
    if predicted is None:
        return reply
    changed = {
        "step_time_s": predicted["step_time_s"] * times,
        "interval_90_s": [end * times for end in predicted["interval_90_s"]],
    }
    error = None if reply["error"] is None else (1 + reply["error"]) * times - 1
    return reply | {"predicted": predicted | changed, "error": error}
