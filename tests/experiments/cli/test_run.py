"""``meshcast run`` on the command line."""

import json
from pathlib import Path

import pytest

from meshcast.hardware.load import read_yaml
from tests.experiments.cli.samples import JOB, run

KEYS = {"productive", "lost_work", "checkpoint", "restart", "detection", "straggling", "waiting_for_spares"}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(
        JOB + "run: {steps: 5000, seeds: 9, failures: {mtbf_factor: 0.001}, price_per_gpu_hour: 2}\n", "utf-8"
    )
    return path


def test_the_answer_is_that_of_the_contract(job: Path) -> None:
    result = run("run", job, "--json", "--workers", 1)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() >= {"days", "days_interval_90", "goodput", "time_s", "failures", "cost", "energy_mwh", "seeds"}
    assert found["time_s"].keys() >= KEYS and found["seeds"] == 9 and 0 < found["goodput"] < 1
    assert run("run", job, "--json", "--workers", 2).stdout == result.stdout


def test_short_runs_are_in_hours(job: Path) -> None:
    lines = run("run", job, "--workers", 1).stdout.splitlines()
    (hours,) = (line for line in lines if line.startswith("hours"))
    days = json.loads(run("run", job, "--json", "--workers", 1).stdout)["days"]
    assert float(hours.split()[1]) == pytest.approx(24 * days, rel=1e-3)


def test_runs_are_stored_and_go_on(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs.parquet"
    first = run("run", job, "--json", "--out", out, "--workers", 1)
    assert first.exit_code == 0, first.output
    assert run("run", job, "--json", "--out", out, "--workers", 1).stdout == first.stdout
    assert run("run", job, "--json", "--workers", 1).stdout == first.stdout
    other = run("run", job, "--set", "run.seeds=8", "--out", out)
    assert other.exit_code == 2 and "--restart" in other.stderr
    assert run("run", job, "--set", "run.seeds=8", "--out", out, "--restart").exit_code == 0


def test_figures_are_drawn(job: Path, tmp_path: Path) -> None:
    short = ("--set", "run.steps=500", "--set", "run.seeds=2")
    assert run("run", job, *short, "--plot", tmp_path / "run.png").exit_code == 0
    result = run("run", job, *short, "--plot", f"{tmp_path}/figures/", "--json")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"run.png", "curves.png"}
    assert {"curves", "best_interval_s", "worth"} <= json.loads(result.stdout).keys()


LOG = "time_h,component,nodes\n" + "".join(f"{7 * i},gpu,{i % 2}\n{7 * i + 3},software,\n" for i in range(1, 30))


def test_rates_of_a_log_become_keys_of_a_job(job: Path, tmp_path: Path) -> None:
    log, keys = tmp_path / "failures.csv", tmp_path / "keys.yaml"
    log.write_text(LOG + "206,end,\n", "utf-8")
    assert run("import", "failure-log", log, "--out", keys).exit_code == 0
    components = read_yaml(keys).data["run"]["failures"]["components"]
    assert components["gpu"] == {"per": "job", "mtbf_hours": pytest.approx(206 / 29), "shape": 20.0}
    assert components["software"]["loses"] == "nothing"
    found = json.loads(run("import", "failure-log", log, "--gpus", 16, "--json").stdout)
    assert found["run"]["failures"]["components"]["gpu"] == {"per": "gpu", "mtbf_hours": pytest.approx(16 * 206 / 29)}
    (low, high), count = found["fits"][0]["mtbf_interval_90_hours"], found["fits"][0]["failures"]
    assert low < 206 / 29 < high and count == 29
    change = json.dumps(found["run"]["failures"])
    assert run("run", job, "--set", f"run.failures={change}", "--set", "run.seeds=1").exit_code == 0
