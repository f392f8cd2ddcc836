"""`meshcast compare` and `meshcast why`: pages, JSON, figures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshcast.experiments.explain import sensitivity
from meshcast.hardware.units import GIB
from meshcast.simulator import load_job, simulate
from tests.experiments.cli.samples import JOB, run


def test_a_job_is_compared_with_itself_changed(job: Path) -> None:
    result = run("compare", job, "--set", "plan.tp=2", "--plot", job.parent / "both.png")
    assert result.exit_code == 0, result.output
    assert "plan.mesh.tp" in result.stdout and "part of the step" in result.stdout and "fullest stage" in result.stdout
    assert (job.parent / "both.png").exists()
    answer = json.loads(run("compare", job, "--set", "plan.tp=2", "--json").stdout)
    steps = [simulate(load_job(job, changes)).step_time for changes in ((), ["plan.tp=2"])]
    assert answer["step_time_s"] == steps
    total = [sum(pair[i] for pair in answer["breakdown_s"].values()) for i in (0, 1)]
    assert total == pytest.approx(steps)


def test_two_files_are_compared(job: Path) -> None:
    other = job.with_name("other.yaml")
    other.write_text(JOB.replace("tp: 4", "tp: 8"), "utf-8")
    assert run("compare", job, other, "--json").stdout == run("compare", job, "--set", "plan.tp=8", "--json").stdout


def test_why_names_the_hardware_that_matters(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sensitivity.explain(load_job(job))  # once for both forms of the answer
    monkeypatch.setattr(sensitivity, "explain", lambda *_: found)
    result = run("why", job, "--plot", job.parent / "why.svg")
    assert result.exit_code == 0, result.output
    assert "peak rate in bf16" in result.stdout and "Without effect" in result.stdout
    assert "critical path" in result.stdout and "framework.set.attention" in result.stdout
    assert (job.parent / "why.svg").exists()
    answer = json.loads(run("why", job, "--json").stdout)
    report = simulate(load_job(job))
    assert answer["hardware"][0]["figure"] == "launch"  # its layers are small
    assert answer["step_time_s"] == report.step_time
    first = answer["hardware"][0]["step_time_s"]
    assert first["better"] < answer["step_time_s"] < first["worse"]
    fields = {one["field"]: one for one in answer["assumed_fields"]}
    (unfused,) = fields["framework.set.attention"]["alternatives"]
    changed = simulate(load_job(job, ["framework.set.attention=unfused"]))
    assert unfused == {
        "value": "unfused",
        "step_time_s": changed.step_time,
        "peak_device_gib": changed.peak_device / GIB,
        "fits": changed.fits,
    }
    effects = [one["step_effect_s"] for one in answer["assumed_fields"]]
    assert effects == sorted(effects, reverse=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "JOB"), "it takes two jobs"),
        (("compare", "JOB", "nothing.yaml"), "no such file"),
        (("compare", "JOB", "--set", "plan.tp=3"), "plan"),
        (("why", "JOB", "--set", "plan.no=1"), "plan.no"),
        (("why", "JOB", "--plot", "figure.gif"), ".png, .svg or .pdf"),
    ],
)
def test_what_cannot_be_explained_is_refused_in_one_message(job: Path, words: tuple[str, ...], message: str) -> None:
    result = run(*(str(job) if word == "JOB" else word for word in words))
    assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output
