"""`meshcast compare` and `meshcast why`: JSON and figures; their pages: `tests/snapshots`."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshcast.experiments.explain import sensitivity
from meshcast.hardware.units import GIB
from meshcast.simulator import load_job, simulate
from tests.experiments.cli.samples import JOB, answer, run


def test_a_job_is_compared_with_itself_changed(job: Path) -> None:
    assert run("compare", job, "--set", "plan.tp=2", "--plot", job.parent / "both.png").exit_code == 0
    assert (job.parent / "both.png").exists()
    compared = answer("compare", job, "--set", "plan.tp=2")
    steps = [simulate(load_job(job, changes)).step_time for changes in ((), ["plan.tp=2"])]
    assert compared["step_time_s"] == steps
    assert [sum(pair[i] for pair in compared["breakdown_s"].values()) for i in (0, 1)] == pytest.approx(steps)
    other = job.with_name("other.yaml")
    other.write_text(JOB.replace("tp: 4", "tp: 2"), "utf-8")
    assert answer("compare", job, other) == compared


def test_why_names_the_hardware_that_matters(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, fields = sensitivity.hardware_figures, sensitivity.assumed_fields  # of both, those that matter here
    monkeypatch.setattr(sensitivity, "hardware_figures", lambda *of: [it for it in figures(*of) if it.name == "launch"])
    wanted = ("framework.set.attention", "framework.set.launch_s")
    monkeypatch.setattr(sensitivity, "assumed_fields", lambda *of: [it for it in fields(*of) if it.name in wanted])
    explained = answer("why", job, "--plot", job.parent / "why.svg")
    assert (job.parent / "why.svg").exists()
    report = simulate(load_job(job))
    assert explained["hardware"][0]["figure"] == "launch"  # its layers are small
    assert explained["step_time_s"] == report.step_time
    launch = explained["hardware"][0]["step_time_s"]
    assert launch["better"] < explained["step_time_s"] < launch["worse"]
    changed = simulate(load_job(job, ["framework.set.attention=unfused"]))
    (unfused,) = next(it for it in explained["assumed_fields"] if it["field"] == wanted[0])["alternatives"]
    assert unfused == {
        "value": "unfused",
        "step_time_s": changed.step_time,
        "peak_device_gib": changed.peak_device / GIB,
        "fits": changed.fits,
    }
    effects = [it["step_effect_s"] for it in explained["assumed_fields"]]
    assert effects == sorted(effects, reverse=True) and len(effects) == 2
