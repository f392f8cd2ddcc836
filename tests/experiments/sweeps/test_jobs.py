"""``predict --jobs``: every line is answered, in order, as it would be alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.sweeps import jobs as module
from meshcast.experiments.sweeps.jobs import forecast_lines
from meshcast.simulator import simulate
from meshcast.simulator.costs.calibration import calibration

JOBS: list[dict[str, Any]] = [
    {"id": "a", "model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 16}, "plan": {"tp": 4, "pp": 2}},
    {"id": 2, "model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 16}, "plan": {"tp": 8}},
    {"model": "llama3-8b", "cluster": "dgx-a100:2", "batch": {"global": 32}, "plan": {"tp": 4, "pp": 2}},
    {"model": "gpt2", "cluster": "dgx-h100:1", "batch": {"global": 64}, "plan": {"tp": 2, "pp": 2, "chunks": 3}},
]


def lines(jobs: list[Any]) -> list[str]:
    return [job if isinstance(job, str) else json.dumps(job) for job in jobs]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["predict", *words])


@pytest.mark.slow
def test_jobs_that_share_a_workshop_are_answered_as_alone() -> None:
    # Twice each, and the other way round, so that everything that can be shared is.
    alone = [simulate(job).to_dict() for job in JOBS]
    for order in ([0, 1, 2, 3], [0, 1, 2, 3] * 2, [3, 2, 1, 0]):
        found = list(forecast_lines(lines([JOBS[number] for number in order]), "jobs.jsonl", Path(".")))
        assert found == [alone[number] for number in order]


@pytest.mark.slow
def test_plans_that_use_other_axes_share_nothing_that_differs() -> None:
    """Gradients are summed over the axes that are larger than one, whichever they are."""
    jobs = [
        {
            "model": "llama3-8b",
            "cluster": "dgx-h100:2",
            "batch": {"global": 64, "sequence": 2048},
            "plan": {
                "mesh": {"replicate": replicate, "shard": 16 // replicate},
                "schemes": [{"use": use, "over": ["replicate", "shard"]}],
            },
        }
        for use in ("data/ddp", "data/zero-1")
        for replicate in (1, 2, 16)
    ]
    alone = {json.dumps(job): simulate(job).to_dict() for job in jobs}
    for order in permutations(jobs[:3]), permutations(jobs[3:]):
        for some in order:
            assert list(forecast_lines(lines(list(some)), "jobs", Path("."))) == [
                alone[json.dumps(job)] for job in some
            ]


@pytest.mark.slow
def test_experts_that_are_read_otherwise_share_nothing_that_differs() -> None:
    """Spread, divided or copied over the same ranks: equal sizes of other axes."""
    model = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32}
    moe = {"experts": 8, "top_k": 2, "expert_ffn": 64}
    jobs = [
        {
            "model": {**model, "moe": moe},
            "cluster": "dgx-h100:1",
            "batch": {"global": 16},
            "plan": {"tp": tp, "ep": ep, "etp": etp},
        }
        for tp in (1, 2)
        for ep, etp in ((8, 1), (1, 8), (4, 2), (2, 4), (2, 2), (1, 1))
    ]
    alone = [simulate(job).to_dict() for job in jobs]
    for step in (1, -1):
        assert list(forecast_lines(lines(jobs[::step]), "jobs", Path("."))) == alone[::step]


def test_answers_do_not_depend_on_earlier_jobs() -> None:
    """Micro-batches of other plans leave states behind that differ from ours by rounding."""
    model = {"preset": "llama3-8b", "layers": 8}
    jobs = [
        {
            "model": model,
            "cluster": "dgx-h100:2",
            "batch": {"global": batch},
            "plan": {"tp": tp, "pp": 2, "recompute": kind},
        }
        for batch in (16, 48)
        for tp in (2, 8)
        for kind in ("none", "full")
    ]
    assert list(forecast_lines(lines(jobs), "jobs", Path("."))) == [simulate(job).to_dict() for job in jobs]


def test_no_accepted_value_ends_the_run() -> None:
    settings: list[dict[str, Any]] = [
        {"sigmas": {"other": 3}},
        {"sigmas": {"other": 500}},
        {"launch_s": 1},
        {"launch_s": 1e300},
        {"rates": {"kernel": 1e-3}},
        {"rates": {"kernel": 1e-300}},
        {"bucket": {"elements": 1e-9, "elements_per_rank": 0}},
        {"step_overhead_s": 1e308},
    ]
    jobs = [{**JOBS[1], "framework": {"name": "megatron-core", "set": one}} for one in settings]
    jobs += [{**JOBS[1], "run": {"tokens": 1e308, "price_per_gpu_hour": 1e308}}]
    found = list(forecast_lines(lines(jobs), "jobs", Path(".")))
    assert ["error" in answer for answer in found] == [False, True, False, True, False, True, False, True, True]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), RecursionError("deep"), OSError(5, "lost"), MemoryError()])
def test_a_defect_costs_one_line_and_gives_its_job(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Any, *more: Any) -> Any:
        if job.id == "bad":
            raise error
        return simulate(job, *more)

    monkeypatch.setattr(module, "simulate", failing)
    bad = {**JOBS[2], "id": "bad"}
    first, failed, last = forecast_lines(lines([JOBS[0], bad, JOBS[1]]), "jobs.jsonl", Path("."))
    assert first["id"] == "a" and last == simulate(JOBS[1]).to_dict()
    assert failed["id"] == "bad" and failed["line"] == 2 and failed["job"] == bad
    assert failed["error"]["kind"] == "Defect" and failed["error"]["where"] == "jobs.jsonl:2"
    assert failed["error"]["rule"] == f"meshcast failed: {type(error).__name__}: {error}"


def test_jobs_are_forecast_with_a_calibration_of_their_own(tmp_path: Path) -> None:
    shipped = Path(calibration.__file__).with_name("h100-sxm.yaml").read_text()
    (tmp_path / "h100-sxm.yaml").write_text(shipped)
    (tmp_path / "jobs.jsonl").write_text(json.dumps(JOBS[1]))
    result = run("--jobs", str(tmp_path / "jobs.jsonl"), "--calibration", str(tmp_path))
    assert result.exit_code == 0 and json.loads(result.stdout)["step_time_s"] > 0


def test_numbers_that_no_text_holds_are_answered(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text(json.dumps(JOBS[0]))
    result = run("--jobs", str(tmp_path / "jobs.jsonl"), "--set", "batch.micro=0x1" + "0" * 5000)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["error"]["value"] == "a number of more than 4,300 digits"


def test_empty_lines_are_no_jobs_but_count(tmp_path: Path) -> None:
    (bad,) = forecast_lines(["", "  \n", "{}"], "jobs.jsonl", tmp_path)
    assert bad["line"] == 3 and bad["error"]["where"].startswith("jobs.jsonl:3")


def test_paths_start_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("{preset: gpt2, layers: 2}")
    job = {**JOBS[1], "model": "small.yaml", "plan": {}}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(job))
    result = run("--jobs", str(tmp_path / "jobs.jsonl"))
    assert result.exit_code == 0 and json.loads(result.stdout)["step_time_s"] > 0


def test_answers_go_into_a_file_line_by_line(tmp_path: Path) -> None:
    given, out = tmp_path / "jobs.jsonl", tmp_path / "answers.jsonl"
    given.write_text("\n".join(lines([*JOBS, {"id": "bad"}])) + "\n")
    result = run("--jobs", str(given), "--out", str(out), "--set", "batch.micro=2")
    assert result.exit_code == 0 and result.stdout == ""
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in found] == ["a", 2, None, None, "bad"]
    assert [answer.get("status") for answer in found] == ["fits"] * 4 + [None]
    assert all(answer["job"]["batch"]["micro"] == 2 for answer in found[:4])


def test_interrupted_answers_leave_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = tmp_path / "jobs.jsonl", tmp_path / "answers.jsonl"
    given.write_text("\n".join(lines(JOBS)) + "\n")
    out.write_text("earlier")

    def interrupt(*_: object) -> Iterator[dict[str, Any]]:
        yield {"id": "a"}
        raise KeyboardInterrupt

    monkeypatch.setattr("meshcast.experiments.sweeps.jobs.forecast_lines", interrupt)
    result = run("--jobs", str(given), "--out", str(out))
    assert (result.exit_code, result.stderr) == (130, f"meshcast: interrupted; {out} is as it was before\n")
    assert out.read_text() == "earlier" and len([*tmp_path.iterdir()]) == 2


def test_strict_exits_with_3_if_a_plan_does_not_fit(tmp_path: Path) -> None:
    given = tmp_path / "jobs.jsonl"
    given.write_text(json.dumps({"model": "llama3-70b", "cluster": "dgx-h100:1", "batch": {"global": 8}}))
    assert run("--jobs", str(given)).exit_code == 0
    assert run("--jobs", str(given), "--strict").exit_code == 3


def test_brief_answers_are_step_and_memory_of_whole_ones(tmp_path: Path) -> None:
    jobs = [*JOBS, {"id": "odd", **JOBS[0], "plan": {"tp": 3}}]
    whole, brief = (list(forecast_lines(lines(jobs), "jobs", tmp_path, brief=short)) for short in (False, True))
    for answer, short in zip(whole[:-1], brief[:-1], strict=True):
        memory = {name: answer["memory"][name] for name in short["memory"]}
        assert short["memory"] == pytest.approx(memory, rel=1e-9)
        assert short["step_time_s"] == pytest.approx(answer["step_time_s"], rel=1e-9)
        assert (short["id"], short["status"]) == (answer["id"], answer["status"])
    assert brief[-1] == whole[-1]


def test_brief_answers_follow_changes(tmp_path: Path) -> None:
    changed = {**JOBS[1], "batch": {"global": 32}}
    (answer,) = forecast_lines(lines([JOBS[1]]), "jobs", tmp_path, ["batch.global=32"], brief=True)
    (stated,) = forecast_lines(lines([changed]), "jobs", tmp_path, brief=True)
    assert answer == stated
