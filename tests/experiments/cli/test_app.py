"""The command line, as a user sees it: answers on stdout, one message for a mistake, exit codes. What pages look like:
`tests/snapshots`."""

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
from tests.experiments.cli.samples import ROOT, answer, run


def add_up(tree: Any) -> float:
    return sum(map(add_up, tree.values())) if isinstance(tree, dict) else tree


# ------------------------------------------------------------------------------------------- predict


def test_the_page_fits_on_one_screen_and_adds_up_to_the_step(job: Path) -> None:
    result = run("predict", job)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) <= 50 and max(map(len, lines)) <= 100 and "\x1b" not in result.stdout
    first = next(i for i, line in enumerate(lines) if "hidden ms" in line) + 2
    last = next(i for i, line in enumerate(lines) if line.startswith("step ") and i > first)
    took = [float(re.search(r"([\d,]+\.\d)\s", line)[1].replace(",", "")) for line in lines[first:last] if line]  # type: ignore[index]
    total = float(lines[last].split()[1].replace(",", ""))
    assert len(took) >= 6 and sum(took) == pytest.approx(total, abs=0.06 * len(took))


def test_json_adds_up_and_is_the_same_every_time(job: Path) -> None:
    result = answer("predict", job)
    assert result["status"] == "fits"
    assert add_up(result["breakdown_s"]) == pytest.approx(result["step_time_s"], rel=1e-9)
    assert result["interval_90_s"][0] < result["step_time_s"] < result["interval_90_s"][1]
    assert [stage["stage"] for stage in result["memory"]["stages"]] == [0, 1]
    assert run("predict", job, "--json").stdout == run("predict", job, "--json").stdout


def test_set_changes_a_field(job: Path) -> None:
    result = answer("predict", job, "--set", "plan.tp=8", "--set", "batch.micro=2")
    assert result["job"]["plan"]["mesh"] == {"pp": 2, "dp": 1, "tp": 8}
    assert result["job"]["batch"]["micro"] == 2


def test_a_length_of_run_gives_money(job: Path) -> None:
    result = answer("predict", job, "--set", "run.tokens=1e9", "--set", "run.price_per_gpu_hour=2")["run"]
    assert result["cost"] == pytest.approx(2 * result["gpu_hours"])


def test_strict_exits_with_3_if_a_plan_does_not_fit(job: Path) -> None:
    assert run("predict", job, "--strict").exit_code == 0
    # For a plan in the long form no changes that would make it fit are looked for.
    longer = ("--set", "plan={mesh: {dp: 16}, schemes: [{use: data/ddp, over: dp}]}")
    assert run("predict", job, *longer).exit_code == 0
    result = run("predict", job, *longer, "--strict", "--json")
    printed = json.loads(result.stdout)
    assert result.exit_code == 3 and (printed["status"], printed["fitting_changes"]) == ("does-not-fit", [])
    assert "GiB more than the 79.19 GiB of a GPU" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.png", "a.svg"])
@pytest.mark.parametrize("change", drawn(["batch.global=16", "plan={tp: 8}", "plan={tp: 8, pp: 2, chunks: 2}"], keep=3))
def test_a_plot_is_drawn_and_the_same_again(job: Path, name: str, change: str) -> None:
    path, start = job.parent / name, {"a.png": b"\x89PNG", "a.svg": b"<?xml"}[name]
    drawings = []
    for _ in range(2):
        assert run("predict", job, "--plot", path, "--set", change).exit_code == 0
        drawings.append(path.read_bytes())
    assert drawings[0] == drawings[1] and drawings[0].startswith(start) and len(drawings[0]) > 10_000


# -------------------------------------------------------------------------------------- list, validate


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("gpus", "h100-sxm", "bf16 TFLOP/s"),
        ("nodes", "dgx-h100", "infiniband-ndr"),
        ("clusters", "dgx-h100:COUNT", "selene"),
        ("models", "mixtral-8x7b", "2 of 8 experts"),
        ("schemes", "pipeline/interleaved-1f1b", "arXiv:2104.04473"),
        ("frameworks", "megatron-core", "NVIDIA Megatron-Core"),
    ],
)
def test_lists(kind: str, name: str, words: str) -> None:
    page = run("list", kind)
    assert page.exit_code == 0 and name in page.stdout and words in page.stdout
    assert name in [row["name"] for row in answer("list", kind)]
    assert kind != "models" or "8,030,261,248" in page.stdout  # parameters of llama3-8b


def test_validate_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    case = '{"schedule": "1f1b", "p": 2, "m": 4, "t_f": 1, "t_b": 1, "t_w": 1}'
    path.write_text(f'{case}\n\nnot json\n[1]\n{{"schedule": "1f2b"}}\n{case}\n', "utf-8")
    rows = answer("validate", "pipeline", "--data", path)["rows"]
    assert [row["status"] == "refused" for row in rows] == [False, True, True, True, False]
    assert rows[0] == rows[4] and rows[0]["makespan"] == 15
    assert rows[0]["case"] == {"schedule": "1f1b", "p": 2, "m": 4, "v": 1, "t_f": 1, "t_b": 1, "t_w": 1, "hop": 0}
    assert "cases.jsonl:3" in rows[1]["reason"] and "cases.jsonl:4" in rows[2]["reason"]
    lists = {"schedule": "1f1b", "t_f": [1, 1, 1, 2], "slices": 2}
    assert describe_inputs(lists) == "t_f [1, 1, 1, 2], t_w 0, hop 0, slices 2"


# ------------------------------------------------------------------------------------------ the whole


def test_version() -> None:
    try:
        expected = version("meshcast")
    except PackageNotFoundError:
        expected = "0+unknown"
    result = run("--version")
    assert result.exit_code == 0 and result.stdout.split()[:2] == ["meshcast", expected]  # then the commit


def imports(code: str, heavy: set[str], **variables: str) -> tuple[str, str]:
    """Returns what code prints in a process of its own; which of the heavy packages it imports, and the number of
    threads that it leaves numpy."""
    tell = (
        f"import os, sys\n{code}\nprint(sorted({heavy!r} & set(sys.modules)), os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    env = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")} | variables
    done = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, cwd=ROOT, check=True, env=env)
    printed, _, imported = done.stdout.rstrip("\n").rpartition("\n")
    return f"{printed}\n", imported


@pytest.mark.parametrize("option", drawn(["--help", "--version"], keep=2))
def test_a_glance_imports_nothing_heavy(option: str) -> None:
    code = f"from experiments.cli.app import app\ntry:\n    app([{option!r}])\n"
    code += "except SystemExit as end:\n    assert not end.code"
    assert imports(code, {"numpy", "pydantic", "simpy", "matplotlib", "pandas", "torch"})[1] == "[] None"


def test_a_forecast_imports_only_what_it_needs_and_is_that_of_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries for drawing and tables are heavy and not needed. Processes hash by seeds of their own."""
    monkeypatch.chdir(ROOT)
    words = ["predict", "examples/llama3-70b-dgx-h100.yaml", "--json", "--set", "batch.global=64"]
    code = f"from experiments.cli.start import main\nsys.argv = {['meshcast', *words]}\n"
    code += "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    heavy = {"matplotlib", "pandas", "scipy", "torch", "typer", "meshcast.validation"}
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    printed, imported = imports(code, heavy | {"meshcast.experiments.render.matplotlib.sheet"}, PYTHONHASHSEED=seed)
    assert imported == "[] 1" and run(*words).stdout == printed and len(printed) > 1000


def test_an_interrupt_is_quiet(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshcast.simulator.loading.load.load_job", interrupt)
    result = run("predict", job)
    assert result.exit_code == 130 and result.output == ""
