"""Logs of failures: read, replayed, and rates fitted to them."""

import math
from pathlib import Path

import numpy as np
import pytest

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.runs.failure_log import FittedRate, ObservedLog, fit_rates, fit_weibull, read_failure_log
from meshcast.simulator.runs.failures import Failure
from meshcast.simulator.runs.inputs import make_run
from meshcast.simulator.runs.training import simulate_run

LOG = """time_h,component,nodes,repair_h,remark
1.5,gpu,3,24,replaced
2.25,software,,,NCCL timeout
10,switch,0 1 2,4.5,
100,end,,,
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "failures.csv"
    path.write_text(text, "utf-8")
    return path


def test_a_log_is_read(tmp_path: Path) -> None:
    log = read_failure_log(write(tmp_path, LOG), 4)
    assert log.observed == 100 * 3600
    assert log.failures[0] == Failure(5400.0, "gpu", (3,), 86_400.0) and log.failures[1].nodes == ()


def test_a_log_of_more_components_than_a_page_shows_is_refused(tmp_path: Path) -> None:
    rows = "".join(f"1,kind {number}\n" for number in range(1001))
    with pytest.raises(MeshcastError, match=r"failures\.csv: .*1,001 components"):
        read_failure_log(write(tmp_path, f"time_h,component\n{rows}"), 4)


def test_a_node_is_lost_once_and_a_log_of_no_time_has_no_rates(tmp_path: Path) -> None:
    log = read_failure_log(write(tmp_path, "time_h,component,nodes\n0,gpu,1 0 1\n0,gpu,2\n"), 4)
    assert log.failures[0].nodes == (1, 0)
    with pytest.raises(MeshcastError, match="covers no time"):
        fit_rates(log)
    job = {"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:4"}
    plan = make_run(
        simulate(load_job({**job, "run": {"steps": 9, "failures": {"log": "failures.csv"}}}, base=tmp_path))
    )
    assert simulate_run(plan.setting, 0, 0).failures == {"gpu": 2}


def test_a_log_is_replayed_in_every_run(tmp_path: Path) -> None:
    write(tmp_path, LOG)
    job = {"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:4"}
    run = {"days": 1, "failures": {"log": "failures.csv"}, "recovery": {"spares": 0}}
    plan = make_run(simulate(load_job({**job, "run": run}, base=tmp_path)))
    found = [simulate_run(plan.setting, 0, number) for number in range(2)]
    assert found[0] == found[1] and found[0].failures == {"gpu": 1, "software": 1, "switch": 1}
    # Node 3 is away from 1.5 h for a day; the others that fail meanwhile are back before it.
    assert found[0].time_s["waiting_for_spares"] == pytest.approx(22.5 * 3600, rel=0.02)


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.5])
def test_weibull_rates_are_found_again(shape: float) -> None:
    gaps = 100.0 * np.random.default_rng(4).weibull(shape, 4000)
    found, scale = fit_weibull(gaps)
    assert found == pytest.approx(shape, rel=0.04) and scale == pytest.approx(100.0, rel=0.06)


def test_the_fit_has_the_greatest_likelihood() -> None:
    gaps, rest = 50.0 * np.random.default_rng(5).weibull(1.4, 60), 20.0

    def likelihood(shape: float, scale: float) -> float:
        ended = np.log(shape / scale) + (shape - 1) * np.log(gaps / scale) - (gaps / scale) ** shape
        return float(ended.sum()) - (rest / scale) ** shape

    shape, scale = fit_weibull(gaps, rest)
    best = likelihood(shape, scale)
    nearby = [(shape * a, scale * b) for a in (0.98, 1.0, 1.02) for b in (0.98, 1.0, 1.02)]
    assert all(likelihood(*one) <= best + 1e-9 for one in nearby)
    failures = tuple(Failure(float(time), "gpu") for time in np.cumsum(gaps))
    (rate,) = fit_rates(ObservedLog(failures, failures[-1].time + rest))
    assert rate.gain == pytest.approx(best - likelihood(1.0, (gaps.sum() + rest) / 60), rel=1e-6) and rate.gain > 1


@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_interval_of_a_rate_leaves_a_twentieth_at_either_end(count: int) -> None:
    """Of Poisson numbers as many as were observed, or fewer, and as many or more (Garwood 1936)."""
    (rate,) = fit_rates(ObservedLog(tuple(Failure(i + 1.0, "gpu") for i in range(count)), 1000.0))

    def at_most(number: int, mean: float) -> float:
        return sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(number + 1))

    assert at_most(count, 1000 / rate.low) == pytest.approx(0.05, abs=0.002)
    assert 1 - at_most(count - 1, 1000 / rate.high) == pytest.approx(0.05, abs=0.012)


def test_rates_of_components(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    times = np.cumsum(rng.exponential(10.0, 200))
    rows = [f"{time},gpu" for time in times] + [f"{times[-1] + 5},end"]
    log = read_failure_log(write(tmp_path, "time_h,component\n" + "\n".join(rows)))
    (found,) = fit_rates(log)
    assert isinstance(found, FittedRate) and found.failures == 200
    assert found.mtbf == pytest.approx(log.observed / 200)
    assert found.low < 36_000 < found.high and found.high / found.low == pytest.approx(
        math.exp(2 * 1.645 / 200**0.5), rel=0.03
    )
    assert found.shape == pytest.approx(1.0, abs=0.17) and 0 <= found.gain < 3.3  # three standard deviations, 1 %
