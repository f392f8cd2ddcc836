"""Jobs that share the step of the first: their answers, and which of them do."""

from __future__ import annotations

from contextlib import suppress

import pytest

from meshcast.experiments.explain.assumed_fields import assumed_fields
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator import Job, load_job, simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.hardware_figures import hardware_figures
from tests.draws import drawn
from tests.jobs import JOBS

PLAN = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 8, "micro": 1, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2},
}


@pytest.mark.parametrize("name", drawn(sorted(JOBS), 6))
def test_a_job_beside_others_has_the_answer_that_it_has_alone(name: str) -> None:
    job, shared = load_job(JOBS[name]), SharedWork()
    report = simulate(job, shared_work=shared)
    others = [figure.change(job, 1.1) for figure in hardware_figures(job, bool(report.host_uses))[::7]]
    for field in assumed_fields(report)[::40]:
        with suppress(MeshcastError):  # the plan or the hardware rules this value out
            simulate(other := field.change(field.others[0]))
            others.append(other)
    for other in others:
        assert simulate(other, shared_work=shared).to_dict() == simulate(other).to_dict()


def changed(job: Job, name: str) -> Job:
    """Returns a job with a better figure of its hardware."""
    (figure,) = (figure for figure in hardware_figures(job) if figure.name == name)
    return figure.change(job, 1.1)


@pytest.mark.parametrize(
    ("figure", "shares"),
    [("peak_fp32", True), ("step_overhead", True), ("peak_bf16", False), ("network_bandwidth", False)],
)
def test_a_job_shares_the_first_step_exactly_if_all_of_its_work_takes_as_long(figure: str, shares: bool) -> None:
    job, shared = load_job(PLAN), SharedWork()
    first = simulate(job, shared_work=shared)
    other = simulate(changed(job, figure), shared_work=shared)
    assert (other.play.program is first.play.program) is shares
    assert (other.play.step is first.play.step) is shares


def test_each_engine_plays_the_shared_step_itself() -> None:
    job, shared = load_job(PLAN), SharedWork()
    first = simulate(job, shared_work=shared)
    other = simulate(job, engine="simpy", shared_work=shared)
    assert other.play.program is first.play.program
    assert other.play.step is not first.play.step
    assert other.step_time == pytest.approx(first.step_time, rel=1e-9)
