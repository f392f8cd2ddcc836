"""The command line, as a user sees it: answers on stdout, one message for a mistake, exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.render.terminal.published import describe_inputs
from tests.draws import drawn
from tests.experiments.cli.samples import ROOT, run
from tests.strategies import some


def answer(*words: object) -> Any:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def operators(tree: Any) -> float:
    return sum(map(operators, tree.values())) if isinstance(tree, dict) else tree


# ------------------------------------------------------------------------------------------- predict


def test_the_page_fits_on_one_screen(job: Path) -> None:
    result = run("predict", job)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 100
    for words in ("llama3-8b", "dgx-h100:2", "pp 2 x dp 2 x tp 4", "90% interval", "MFU", "HFU", "GEMMs"):
        assert words in result.stdout
    for words in ("tensor communication", "pipeline bubble", "host:", "fits with over 99 %:", "stage 1", "limits"):
        assert words in result.stdout
    assert "\x1b" not in result.stdout


def test_the_rows_of_the_page_add_up_to_the_step(job: Path) -> None:
    lines = run("predict", job).stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if "hidden ms" in line) + 2
    last = next(i for i, line in enumerate(lines) if line.startswith("step ") and i > first)
    took = [float(re.search(r"([\d,]+\.\d)\s", line)[1].replace(",", "")) for line in lines[first:last] if line]  # type: ignore[index]
    total = float(lines[last].split()[1].replace(",", ""))
    assert len(took) >= 6
    assert sum(took) == pytest.approx(total, abs=0.06 * len(took))


def test_json_adds_up_and_is_the_same_every_time(job: Path) -> None:
    result = answer("predict", job, "--json")
    assert result["status"] == "fits"
    assert operators(result["breakdown_s"]) == pytest.approx(result["step_time_s"], rel=1e-9)
    assert result["interval_90_s"][0] < result["step_time_s"] < result["interval_90_s"][1]
    assert [stage["stage"] for stage in result["memory"]["stages"]] == [0, 1]
    assert run("predict", job, "--json").stdout == run("predict", job, "--json").stdout


def test_set_changes_a_field(job: Path) -> None:
    result = answer("predict", job, "--json", "--set", "plan.tp=8", "--set", "batch.micro=2")
    assert result["job"]["plan"]["mesh"] == {"pp": 2, "dp": 1, "tp": 8}
    assert result["job"]["batch"]["micro"] == 2


def test_a_length_of_run_gives_days_and_money(job: Path) -> None:
    changes = ("--set", "run.tokens=1e9", "--set", "run.price_per_gpu_hour=2")
    result = answer("predict", job, "--json", *changes)["run"]
    assert result["cost"] == pytest.approx(2 * result["gpu_hours"])
    page = run("predict", job, *changes).stdout
    assert "for 1 B tokens" in page and "GPU-hours, cost" in page


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("plan.tp=3", "plan.tp is 3"),
        ("plan.typo=3", "typo"),
        ("model=llama3-8c", "Did you mean 'llama3-8b'"),
        ("plan.tp", "a change is written field=value"),
        ("batch.global=17", "would work"),
    ],
)
def test_a_mistake_ends_in_one_message(job: Path, change: str, words: str) -> None:
    result = run("predict", job, "--set", change)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr and "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_with_json_a_mistake_is_an_object(job: Path) -> None:
    result = run("predict", job, "--json", "--set", "plan.tp=3")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "PlanError" and error["value"] == 3 and error["rule"] and error["remedy"]


@pytest.mark.parametrize("text", ["", "model: [", "- a", "model: llama3-8b", "\x00"])
def test_a_malformed_job(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, "utf-8")
    for where in (path, tmp_path, tmp_path / "absent.yaml"):
        result = run("predict", where)
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.output


def test_strict_exits_with_3_if_a_plan_does_not_fit(job: Path) -> None:
    assert run("predict", job, "--strict").exit_code == 0
    # For a plan in the long form no changes that would make it fit are looked for.
    longer = ("--set", "plan={mesh: {dp: 16}, schemes: [{use: data/ddp, over: dp}]}")
    assert run("predict", job, *longer).exit_code == 0
    result = run("predict", job, *longer, "--strict")
    assert result.exit_code == 3
    assert "does not fit" in result.stdout and "GiB more than the 79.19 GiB of a GPU" in result.stderr
    assert json.loads(run("predict", job, *longer, "--strict", "--json").stdout)["status"] == "does-not-fit"


# ---------------------------------------------------------------------------------------------- plot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"),
    some(
        [
            ("batch.global=16", "a.png"),
            ("plan={tp: 8}", "a.png"),
            ("batch.global=128", "a.png"),
            ("plan={tp: 8, pp: 2, chunks: 2}", "a.png"),
            ("plan={tp: 8, pp: 2, chunks: 2}", "a.svg"),
            ("batch.global=128", "a.svg"),
            ("batch.global=16", "a.svg"),
            ("plan={tp: 8}", "a.svg"),
        ],
        4,
    ),
)
def test_a_plot_is_drawn(job: Path, name: str, change: str) -> None:
    path, start = job.parent / name, {"a.png": b"\x89PNG", "a.svg": b"<?xml"}[name]
    result = run("predict", job, "--plot", path, "--set", change)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(start) and path.stat().st_size > 10_000
    again = path.read_bytes()
    run("predict", job, "--plot", path, "--set", change)
    assert path.read_bytes() == again


@pytest.mark.parametrize("name", ["a.jpg", "a", "absent/a.png", "folder.png"])
def test_a_plot_that_cannot_be_written(job: Path, name: str) -> None:
    (job.parent / "folder.png").mkdir()
    result = run("predict", job, "--plot", job.parent / name)
    assert result.exit_code == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "--plot" in result.stderr


# -------------------------------------------------------------------------------------- list, validate


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("gpus", "h100-sxm", "bf16 TFLOP/s"),
        ("nodes", "dgx-h100", "infiniband-ndr"),
        ("clusters", "dgx-h100:COUNT", "selene"),
        ("models", "llama3-8b", "8,030,261,248"),
        ("models", "mixtral-8x7b", "2 of 8 experts"),
        ("schemes", "pipeline/interleaved-1f1b", "arXiv:2104.04473"),
        ("frameworks", "megatron-core", "NVIDIA Megatron-Core"),
    ],
)
def test_lists(kind: str, name: str, words: str) -> None:
    page = run("list", kind)
    assert page.exit_code == 0, page.output
    assert name in page.stdout and words in page.stdout
    assert name in [row["name"] for row in answer("list", kind, "--json")]


def test_an_unknown_list_points_to_the_nearest() -> None:
    result = run("list", "modles")
    assert result.exit_code == 2 and "Did you mean 'models'" in result.stderr


def test_validate_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    case = '{"schedule": "1f1b", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1}'
    path.write_text(f'{case}\n\nnot json\n[1]\n{{"schedule": "1f2b"}}\n{case}\n', "utf-8")
    rows = answer("validate", "pipeline", "--data", path, "--json")["rows"]
    assert [row["status"] == "refused" for row in rows] == [False, True, True, True, False]
    assert rows[0] == rows[4] and rows[0]["makespan"] == 15
    assert rows[0]["case"] == {"schedule": "1f1b", "p": 2, "m": 4, "v": 1, "t_f": 1, "t_b": 1, "t_w": 1, "hop": 0}
    assert "cases.jsonl:3" in rows[1]["reason"] and "cases.jsonl:4" in rows[2]["reason"]
    assert "1f1b" in run("validate", "pipeline", "--data", path).stdout


def test_validate_without_data_runs_the_examples() -> None:
    result = run("validate", "pipeline")
    assert result.exit_code == 0 and "interleaved-1f1b" in result.stdout
    assert "t_f 2, t_b 2, t_w 2, hop 0" in result.stdout and "0.25" in result.stdout
    assert describe_inputs({"schedule": "1f1b", "t_f": [1, 1, 1, 2], "slices": 2}) == (
        "t_f [1, 1, 1, 2], t_w 0, hop 0, slices 2"
    )


def test_an_unsupported_validation_is_refused(tmp_path: Path) -> None:
    result = run("validate", "claim")
    assert result.exit_code == 2 and "claims" in result.stderr
    assert run("validate", "pipeline", "--data", tmp_path / "absent").exit_code == 2


# ------------------------------------------------------------------------------------------ the whole


def test_version() -> None:
    try:
        expected = version("meshcast")
    except PackageNotFoundError:
        expected = "0+unknown"
    result = run("--version")
    assert result.exit_code == 0 and result.stdout.split()[:2] == ["meshcast", expected]  # then the commit


@pytest.mark.parametrize("option", [pytest.param("--version", marks=pytest.mark.slow), "--help"])
def test_a_glance_imports_nothing_heavy(option: str) -> None:
    code = (
        "import sys\nfrom experiments.cli.app import app\n"
        f"try:\n    app([{option!r}])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'numpy', 'pydantic', 'simpy', 'matplotlib', 'pandas', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("example", drawn(["llama3-70b-dgx-h100", "gpt3-175b-dgx-a100"], keep=2))
def test_a_forecast_imports_only_what_it_needs(example: str) -> None:
    """Libraries for drawing and tables are heavy and not needed."""
    code = (
        "import os, sys\nfrom experiments.cli.start import main\n"
        f"sys.argv = ['meshcast', 'predict', 'examples/{example}.yaml', '--set', 'batch.global=128']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'matplotlib', 'pandas', 'scipy', 'torch', 'typer', 'meshcast.validation', "
        "'meshcast.experiments.render.matplotlib.sheet'}\n"
        "print(sorted(heavy & set(sys.modules)), os.environ['OPENBLAS_NUM_THREADS'])"
    )
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=env)
    assert done.stdout.splitlines()[-1] == "[] 1"


def test_an_interrupt_is_quiet(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshcast.simulator.loading.load.load_job", interrupted)
    result = run("predict", job)
    assert result.exit_code == 130 and result.output == ""
