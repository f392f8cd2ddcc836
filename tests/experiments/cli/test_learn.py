"""``meshcast learn`` from a file to a forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.experiments.cli.samples import run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Gathers and scatters at half the rate of the links."""
    lines = ["gpu,interconnect,op,gpus,nodes,bytes,time_us,source"]
    for k in range(24, 34):
        seconds = 2 * 2**k * 7 / 8 / 450e9
        for operation in ("all_gather", "reduce_scatter"):
            lines.append(f"h100,NVLink4+NVSwitch,{operation},8,1,{2**k},{seconds * 1e6},AIC nccl-tests (half)")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines))
    return path


def test_what_is_learnt_is_used_and_told(rows: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    answer = json.loads(run("learn", rows, "--out", mine, "--json").stdout)
    (section,) = answer["sections"]
    assert (section["hardware"], section["section"], section["rows"]) == ("nvlink4", "ring", 20)
    assert section["held_back"]["after"] < section["held_back"]["before"]
    job = "examples/llama3-8b-dgx-h100.yaml"
    plain, learnt = (
        json.loads(run("predict", job, "--set", "plan.tp=8", *more, "--json").stdout)
        for more in ((), ("--calibration", mine))
    )
    assert learnt["step_time_s"] > 1.02 * plain["step_time_s"] and "calibration" not in plain
    assert learnt["calibration"] == [f"{mine}/nvlink4.yaml: ring, learnt from {section_source(mine)}"]


def test_what_steps_say_corrects_a_forecast(tmp_path: Path) -> None:
    job, rows = "examples/llama3-8b-dgx-h100.yaml", ["job,step_time_s,plan.tp"]
    for tp in (1, 2, 4, 8):
        plain = json.loads(run("predict", job, "--set", f"plan.tp={tp}", "--json").stdout)["step_time_s"]
        rows.append(f"{Path(job).resolve()},{plain * 1.2},{tp}")
    (table := tmp_path / "steps.csv").write_text("\n".join(rows))
    mine = tmp_path / "mine"
    page = run("learn", table, "--out", mine).stdout
    assert "confirmed by steps held back" in page and "steps.csv: 4" in page
    answer = json.loads(run("predict", job, "--calibration", mine, "--json").stdout)
    learnt, (low, high) = answer["learnt"], answer["interval_90_s"]
    assert learnt["steps"] == 4 and 1.1 < learnt["factor"] < 1.2
    assert answer["step_time_s"] == pytest.approx(learnt["factor"] * learnt["priced_s"])
    assert low < 1.2 * learnt["priced_s"] < high and "learnt" in answer["interval"]["widest"]
    shown = run("predict", job, "--calibration", mine, "--verify")
    assert "from 4 measured steps" in shown.stdout and shown.exit_code == 0


def section_source(mine: Path) -> str:
    import yaml

    return str(yaml.safe_load((mine / "nvlink4.yaml").read_text())["ring"]["common"]["learnt"])
