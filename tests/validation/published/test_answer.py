"""Every published run is answered, in order, the same on any number of processes, and none beats its FLOPs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.validation.published import answer as module
from meshcast.validation.published.answer import answer, answers, map_chunks
from meshcast.validation.published.baseline import add_baselines
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun, UnreadableLine, read, read_shipped
from meshcast.validation.published.summary import summarize_answers
from tests.validation.published.runs import answer_shipped

KEYS = {"id", "status", "reason", "assumed", "predicted", "measured", "error", "memory_error"}


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    return read_shipped()


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    return answer_shipped()


def change_spec(run: PublishedRun, **fields: Any) -> PublishedRun:
    return run.model_copy(update={"spec": run.spec.model_copy(update=fields)})


def sound(rows: list[dict[str, Any]]) -> None:
    """Checks the invariants of every answer."""
    for row in rows:
        assert set(row) >= KEYS
        assert (row["status"] == "refused") == bool(row["reason"]) == (row["predicted"] is None)
        assert "meshcast failed" not in (row["reason"] or ""), row
        if row["predicted"]:
            step, (low, high) = row["predicted"]["step_time_s"], row["predicted"]["interval_90_s"]
            assert 0 < low < step < high and row["predicted"]["peak_memory_gib"] > 0
            assert len(set(row["assumed"])) == len(row["assumed"])
    json.dumps(rows, allow_nan=False)
    assert summarize_answers(rows)["faster_than_peak"] == []


def test_shipped_runs_are_answered(runs: list[PublishedRun], answered: list[dict[str, Any]]) -> None:
    assert [row["id"] for row in answered] == [run.id for run in runs]
    assert {row["status"] for row in answered} == {"predicted"}
    sound(answered)
    for row in answered:
        assert row["error"] == pytest.approx(row["predicted"]["step_time_s"] / row["measured"]["step_time_s"] - 1)
        assert row["memory_error"] is None


def test_the_number_of_processes_changes_nothing(runs: list[PublishedRun], answered: list[dict[str, Any]]) -> None:
    assert json.dumps(list(answers(runs[:4], workers=2))) == json.dumps(answered[:4])


def test_recomputation_costs_the_published_time(answered: list[dict[str, Any]]) -> None:
    # Table 5 of arXiv 2205.05198: 22 to 24 % less time without most of it.
    steps = {row["id"]: row["predicted"]["step_time_s"] for row in answered}
    for size in ("22b", "175b", "530b", "1t"):
        assert 0.65 < steps[f"korthikanti-{size}-selective"] / steps[f"korthikanti-{size}-full"] < 0.85


def test_a_line_that_is_no_run_is_refused() -> None:
    row = answer(UnreadableLine(id="x-1", reason="runs.jsonl:3: not valid JSON"))
    sound([row])
    assert row["id"] == "x-1" and row["source"] is None and "runs.jsonl:3" in row["reason"]


def test_memory_is_forecast_in_the_words_of_the_run(runs: list[PublishedRun]) -> None:
    def peak(kind: str | None, stack: str = runs[0].spec.stack) -> dict[str, Any]:
        measured = runs[0].measured.model_copy(update={"peak_memory_gib": 30.0})
        run = runs[0].model_copy(update={"measured": measured})
        return answer(change_spec(run, memory_kind=kind, stack=stack))

    answered = {kind: peak(kind) for kind in ("torch-allocated", "torch-reserved", "nvidia-smi", "unknown", None)}
    gib = {kind: row["predicted"]["peak_memory_gib"] for kind, row in answered.items()}
    assert gib["torch-allocated"] < gib["torch-reserved"] < gib["nvidia-smi"] == gib["unknown"] == gib[None]
    bridge = {kind: peak(kind, "megatron-bridge")["predicted"]["peak_memory_gib"] for kind in ("unknown", "nvidia-smi")}
    assert bridge["unknown"] < bridge["nvidia-smi"], "its log prints what tensors took"
    assert answered["nvidia-smi"]["memory_error"] == pytest.approx(gib["nvidia-smi"] / 30 - 1)
    assert [kind for kind, row in answered.items() if "memory_kind" in row["assumed"]] == ["unknown", None]


def test_a_run_fits_where_its_forecast_is_within_the_memory_of_the_gpu(runs: list[PublishedRun]) -> None:
    """The 530 B model of Korthikanti et al. has selective recomputation; without any it would not fit in 80 GB."""
    run = next(run for run in runs if run.id == "korthikanti-530b-selective")
    without = change_spec(run, recompute=run.spec.recompute.model_copy(update={"kind": "none"}))
    stated, changed = (answer(each)["predicted"] for each in (run, without))
    assert stated["capacity_gib"] == changed["capacity_gib"] == 80
    assert stated["peak_device_gib"] <= 80 and stated["fits"]
    assert changed["peak_device_gib"] > 80 and not changed["fits"]


def test_the_reason_of_a_refusal_is_that_of_the_simulator(runs: list[PublishedRun]) -> None:
    row = answer(change_spec(runs[0], gpu="abacus"))
    assert row["status"] == "refused" and "abacus" in row["reason"]


def test_a_defect_costs_one_row_and_gives_its_job(runs: list[PublishedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: PublishedRun, shared_work: Any) -> Any:
        if run is runs[1]:
            raise KeyError("lost")
        return forecast_run(run, shared_work)

    monkeypatch.setattr(module, "forecast_run", fail)
    first, failed, last = answers(runs[:3], workers=1)
    assert first["status"] == last["status"] == "predicted" and "job" not in first
    assert failed["status"] == "refused" and failed["reason"] == "meshcast failed: KeyError: 'lost'"
    report = simulate(failed["job"])
    assert report.step_time == pytest.approx(answer(runs[1])["measured"]["step_time_s"], rel=0.5)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"step_time_s": 1e18}, "measured.step_time_s is 1e+18: must be at most 10000000"),
        ({"step_time_s": 1e-300}, "measured.step_time_s is 1e-300: must be at least 1e-06"),
        ({"peak_memory_gib": 1e18}, "measured.peak_memory_gib is 1e+18: must be at most 1000000"),
        ({"step_time_s": True}, "measured.step_time_s is True: must be a number"),
        ({"step_time_s": "200"}, "measured.step_time_s is '200': must be a number"),
        ({"tokens_per_s_per_gpu": 1e-200}, "makes a step of 6.25e+203 s, and a step takes 1e-06 s to 1e+07 s"),
        ({"tokens_per_s_per_gpu": 1e200}, "makes a step of 6.25e-197 s"),
    ],
)
def test_impossible_figures_cost_one_row(figures: dict[str, Any], words: str, tmp_path: Path) -> None:
    # 50,000 x 1,024 tokens over 8,192 GPUs are 6,250 a GPU: 6.25e203 s at 1e-200 tokens/s.
    spec = {"class": "dense", "stack": "megatron-core", "gpus": 8192, "batch": {"global": 50_000, "seq": 1024}}
    lines = [{"id": "a-1", "spec": spec, "measured": figures}, {"id": "a-2", "spec": spec}]
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    bad, good = read(tmp_path / "runs.jsonl")
    assert isinstance(bad, UnreadableLine) and bad.id == "a-1" and isinstance(good, PublishedRun)
    assert words in bad.reason and "runs.jsonl:1" in bad.reason
    rows = list(answers([bad, good], workers=1))
    add_baselines(rows)
    sound(rows)


def test_a_number_beyond_64_bits_costs_one_row(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text('{"id": "a", "spec": {}, "measured": {"tflops": 1e400}}\n{}')
    first, second = read(tmp_path / "runs.jsonl")
    assert isinstance(first, UnreadableLine) and "1e400 is too large" in first.reason
    assert isinstance(second, UnreadableLine) and "runs.jsonl:2" in second.reason


def test_a_worker_that_dies_ends_in_one_message() -> None:
    with pytest.raises(PlanError, match="--jobs is 3: a worker was killed"):
        list(map_chunks(_die, range(3 * module.CHUNK), workers=3))


def _die(_: Any) -> Any:
    os._exit(1)


# -------------------------------------------------------------------------------- the whole data set


def test_a_sample_of_published_runs_is_answered(tables: Any) -> None:
    sample = read(tables.published_runs)[:: 47 if tables.whole else 16]
    rows = list(answers(sample, workers=1))
    add_baselines(rows)
    assert [row["id"] for row in rows] == [run.id for run in sample]
    sound(rows)


@pytest.mark.slow
def test_every_published_run_is_answered(tables: Any) -> None:
    all_runs = read(tables.published_runs)
    rows = list(answers(all_runs))
    add_baselines(rows)
    assert [row["id"] for row in rows] == [run.id for run in all_runs]
    sound(rows)
    figures = summarize_answers(rows)
    by_source = sum(source["rows"] for source in figures["by_source"].values())
    assert figures["predicted"] + figures["refused"] == len(all_runs) == by_source
