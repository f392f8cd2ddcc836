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


def section_source(mine: Path) -> str:
    import yaml

    return str(yaml.safe_load((mine / "nvlink4.yaml").read_text())["ring"]["common"]["learnt"])
