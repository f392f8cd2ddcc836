"""The probability that a plan fits: laws of its distribution, the table of programs, and the verdict of a job."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from meshcast.simulator import Report, simulate
from meshcast.simulator.job.framework import framework_names
from meshcast.simulator.report.peak_errors import (
    EVEN,
    FITS,
    RISK,
    STRANGER,
    PeakError,
    entry_of,
    judge,
    least_room,
    peak_error_of,
)

ERROR = PeakError(0.2, 0.05, 10, 2, "any")
JOB: dict[str, Any] = {"cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1, "micro": 1, "sequence": 2048}}


@cache
def forecast(layers: int, **framework: Any) -> Report:
    stated = {"name": "megatron-core", "set": framework}
    return simulate({**JOB, "model": {"preset": "llama3-8b", "layers": layers}, "framework": stated, "plan": {"tp": 1}})


@pytest.mark.parametrize("probability", [0.001, 0.05, 0.3, 0.5, 0.8, 0.95, 0.999])
def test_a_probability_and_its_ratio_are_inverse(probability: float) -> None:
    assert ERROR.probability(ERROR.ratio(probability)) == pytest.approx(probability, abs=1e-12)


def test_quantiles_are_those_of_the_t_distribution() -> None:
    """With 4 degrees of freedom 5 % lie beyond 2.1318 scales and 0.5 % beyond 4.6041, on each side by its own scale."""
    for share, reach in ((0.95, 2.1318), (0.995, 4.6041)):
        assert ERROR.share(reach * ERROR.above) == pytest.approx(share, abs=1e-5)
        assert ERROR.share(-reach * ERROR.below) == pytest.approx(1 - share, abs=1e-5)


def test_what_has_nothing_or_everything_is_certain() -> None:
    assert ERROR.probability(0.0) == 0.0 and ERROR.probability(float("inf")) == 1.0 and ERROR.probability(1.0) == 0.5


@pytest.mark.parametrize(
    ("probability", "verdict"), [(0.95, "fits"), (0.949, "tight"), (0.5, "tight"), (0.499, "does-not-fit")]
)
def test_verdicts(probability: float, verdict: str) -> None:
    assert judge(probability) == verdict


@pytest.mark.parametrize("name", framework_names())
def test_every_profile_has_a_spread_and_the_least_known_the_widest(name: str) -> None:
    report = forecast(1)
    own, stranger = peak_error_of(report.job.framework), peak_error_of(forecast(1, regime="unknown").job.framework)
    assert own.above < stranger.above
    error = peak_error_of(report.job.framework.model_copy(update={"name": name, "regime": "family"}))
    assert 0.01 <= error.above <= stranger.above and error.below >= 0.01 and error.rows > 0
    assert entry_of("megatron-core", "unknown") == STRANGER and entry_of("internevo", "unknown") == "internevo"


def test_the_verdict_of_a_job_is_that_of_the_room_for_its_need() -> None:
    """Layers are added until the plan does not fit: room, probability and verdict agree, and fall."""
    reports = [forecast(layers) for layers in (10, 13, 14, 16)]
    verdicts, odds = [report.fit.verdict for report in reports], [report.fit.probability for report in reports]
    assert verdicts == [judge(each) for each in odds] and odds == sorted(odds, reverse=True)
    assert (verdicts[0], verdicts[-1]) == ("fits", "does-not-fit")
    for one in reports:
        assert one.fit.room == one.usable[0] / one.fit.held and one.fits == (one.fit.probability >= 0.5)
        assert (one.missing == "") == one.fits
        memory = one.to_dict()["memory"]
        assert memory["capacity_gib"] == 80
        assert memory["fits_probability"] == one.fit.error.probability(one.fit.room)
        low, high = memory["interval_90_gib"]
        assert one.fit.error.share(0.0) == 0.5 and low < memory["peak_allocated_gib"] < high
        assert (one.fit.probability >= FITS) == (one.fit.room >= least_room(one.job.framework, RISK))
    assert least_room(reports[0].job.framework, EVEN) == pytest.approx(1.0)
    assert [report.to_dict()["status"] for report in reports] == [report.fit.verdict for report in reports]


def test_the_host_that_a_plan_offloads_to_counts_too() -> None:
    report = forecast(10)
    plan = {"tp": 1, "offload": ["optimizer"]}
    node = {"gpu": "h100-sxm", "gpus": 1}
    offloaded = simulate({**JOB, "model": {"preset": "llama3-8b", "layers": 10}, "cluster": node, "plan": plan})
    assert offloaded.fit.room <= offloaded.capacity / offloaded.fit.held and report.host_uses == []
    for use in offloaded.host_uses:
        assert use.capacity is None or offloaded.fit.room <= use.capacity / use.needed
