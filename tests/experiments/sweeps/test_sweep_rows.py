"""The rows of a sweep: their values, and that they are the same however they were computed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.output import parts_folder
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.sweeps.store import RANKED_BY, count_equal
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator import simulate
from meshcast.simulator.report.figures import parts_of_step
from tests.draws import drawn_grid
from tests.experiments.sweeps.sweeps import GRID, JOB, Counting, Lazy, Whole, kept, sweep

# ---------------------------------------------------------------------------------------------- rows


def test_rows_are_the_answers_of_predict(reference: Path) -> None:
    of = load_sweep(GRID)
    rows = pq.read_table(reference).to_pylist()
    assert [row["index"] for row in rows] == [i for i in range(32) if of.point(i) in kept(of)]
    assert {row["status"] for row in rows} == {"fits", "invalid"}
    for row in rows[::3]:
        point = of.point(row["index"])
        assert {name: row[name] for name in of.fields} == point
        plan = {key: point[f"plan.{key}"] for key in ("tp", "pp", "recompute")}
        job = {**JOB, "batch": {**JOB["batch"], "micro": point["batch.micro"]}, "plan": plan}
        if row["status"] == "invalid":
            with pytest.raises(MeshcastError) as refused:
                simulate(job)
            assert row["reason"] == f"PlanError {refused.value.where}: {refused.value.rule}. {refused.value.remedy}"
            assert row["step_time_s"] is None and row["limits"] is None
            continue
        answer = simulate(job).to_dict()
        assert row["step_time_s"] == answer["step_time_s"] and row["hfu"] == answer["hfu"]
        assert [row["interval_low_s"], row["interval_high_s"]] == answer["interval_90_s"]
        assert row["peak_device_gib"] == answer["memory"]["peak_device_gib"] and row["limits"] == answer["limits"]
        assert sum(row[part.name] for part in parts_of_step().values()) == pytest.approx(row["step_time_s"], rel=1e-9)
        assert row["exposed_dp_s"] == answer["breakdown_s"]["exposed"]["dp"] and row["reason"] is None


def test_a_plan_that_does_not_fit_is_a_row_with_all_figures(tmp_path: Path) -> None:
    of = load_sweep({"job": {"model": "llama3-70b", "cluster": "dgx-h100:1"}, "vary": {"plan.tp": [8]}})
    summary = run(of, tmp_path / "out.parquet", Lazy())
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["status"] == "does-not-fit" and row["peak_device_gib"] > row["capacity_gib"]
    assert summary["status"] == {"fits": 0, "tight": 0, "does-not-fit": 1, "invalid": 0} and summary["best"] == []


def test_columns_have_the_kind_of_their_values(tmp_path: Path) -> None:
    of = sweep(
        vary={
            "plan.sequence_parallel": [True],
            "run.tokens": [1, 2.5e12],
            "plan.dp": [None, 16],
            "model": ["gpt2-124m", {"preset": "gpt2-355m"}],
        },
        list=[{"plan.recompute": "full"}, {"batch.micro": 2}],
    )
    summary = run(of, tmp_path / "out.parquet", Lazy())
    table = pq.read_table(tmp_path / "out.parquet")
    kinds = [str(table.schema.field(name).type) for name in of.fields]
    assert kinds == ["bool", "double", "int64", "string", "string", "int64"]
    assert set(table["model"].to_pylist()) == {"gpt2-124m", '{"preset": "gpt2-355m"}'}
    assert table["plan.recompute"].to_pylist()[:2] == ["full", None]
    assert table["run.tokens"].to_pylist()[0] == 1.0 and table["days"].to_pylist()[-1] > 0
    assert summary["status"]["fits"] == 16
    frame = pandas.read_parquet(tmp_path / "out.parquet")
    assert len(frame) == 16 and frame["step_time_s"].min() > 0


def test_a_point_whose_constraint_fails_is_a_row_with_the_reason(tmp_path: Path) -> None:
    of = sweep(vary={"plan.tp": [2, 1]}, where=["8 % (plan.tp - 1) == 0"])
    summary = run(of, tmp_path / "out.parquet", Lazy())
    assert (
        summary["status"]["invalid"] == 1
        and "sweep.where[0]: integer modulo by zero" in summary["invalid"][0]["reason"]
    )


def test_a_model_that_is_unknown_costs_its_points_only(tmp_path: Path) -> None:
    of = sweep(vary={"model": ["no-model", "gpt2-124m"]}, where=["layers == 12"])
    summary = run(of, tmp_path / "out.parquet", Lazy())
    assert summary["status"] == {"fits": 1, "tight": 0, "does-not-fit": 0, "invalid": 1}
    assert summary["invalid"][0]["reason"].startswith("ModelError model: no preset")


def test_a_defect_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Any, **_: Any) -> Any:
        if job.batch.micro == 2:
            raise ZeroDivisionError("oh")
        return simulate(job)

    monkeypatch.setattr(sweeps, "simulate", failing)
    summary = run(sweep(vary={"batch.micro": [1, 2, 4]}), tmp_path / "out.parquet", Lazy())
    assert summary["status"]["fits"] == 2
    assert summary["invalid"] == [{"count": 1, "reason": "meshcast failed: ZeroDivisionError: oh"}]


def test_plans_within_the_interval_of_the_best_one_are_equal() -> None:
    ends = ((100.0, 1.25), (81.0, 2.0), (79.0, 2.0))
    rows = [{RANKED_BY: rate, "step_time_s": 1.0, "interval_high_s": high} for rate, high in ends]
    assert [count_equal(rows[:count]) for count in range(4)] == [0, 1, 2, 2]


def test_the_summary(reference: Path, small_chunks: None) -> None:
    summary = run(load_sweep(GRID), reference)
    assert summary["points"] == 32 and summary["excluded"] == 8 and summary["rows"] == 24
    assert summary["status"] == {"fits": 20, "tight": 0, "does-not-fit": 0, "invalid": 4}
    rows = [row for row in pq.read_table(reference).to_pylist() if row["status"] == "fits"]
    rows.sort(key=lambda row: (-row["tokens_per_s_per_gpu"], row["index"]))
    assert [row["index"] for row in summary["best"]] == [row["index"] for row in rows[:10]]
    assert [one["count"] for one in summary["invalid"]] == [4]
    assert "tp x pp = 3 x 1 = 3 must divide the 16 GPUs" in summary["invalid"][0]["reason"]


def test_reasons_that_differ_in_numbers_only_are_one(tmp_path: Path) -> None:
    summary = run(sweep(vary={"plan.tp": [3, 5, 7, 1]}), tmp_path / "out.parquet", Lazy())
    assert [one["count"] for one in summary["invalid"]] == [3]
    assert summary["invalid"][0]["reason"].startswith("PlanError plan.tp: tp x pp = 3 x 1 = 3")


# ----------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_number_of_workers_gives_the_same_bytes(
    workers: int, reference: Path, small_chunks: None, tmp_path: Path
) -> None:
    seen: list[int] = []
    out = tmp_path / "rows.parquet"
    run(load_sweep(GRID), out, workers=workers, watch=lambda done, points: seen.append(done))
    assert out.read_bytes() == reference.read_bytes()
    assert seen == list(range(0, 33, 4)) and not parts_folder(out).exists()


@pytest.mark.usefixtures("known_forecasts")
@pytest.mark.parametrize(("executor", "window"), drawn_grid([Lazy(), Whole(), ThreadPoolExecutor(3)], [1, 3, 128]))
def test_anything_with_a_map_may_work(
    executor: Any, window: int, reference: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "WINDOW", window)
    run(load_sweep(GRID), tmp_path / "rows.parquet", executor)
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()
    if isinstance(executor, Executor):
        assert executor.submit(int, "3").result() == 3  # left as it was


class Stopping:
    """An executor that is interrupted after so many chunks."""

    def __init__(self, after: int) -> None:
        self.after = after

    def map(self, work: Any, tasks: Any) -> Iterator[Any]:
        for number, task in enumerate(tasks):
            if number == self.after:
                raise KeyboardInterrupt
            yield work(task)


def test_kept_rows_are_not_forecast_again(
    reference: Path, known_forecasts: None, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.parquet"
    for after, done in ((0, 0), (3, 3), (1, 4), (0, 4)):
        with pytest.raises(KeyboardInterrupt):
            run(load_sweep(GRID), out, Stopping(after))
        assert not out.exists() and len(list(parts_folder(out).glob("*.parquet"))) == done
    frame = pandas.read_parquet(parts_folder(out))  # what is there may be read
    assert len(frame) == len(pq.read_table(reference).to_pandas().query("index < 16"))
    counting = Counting()
    run(load_sweep(GRID), out, counting)
    assert counting.asked == [16, 20, 24, 28]
    assert out.read_bytes() == reference.read_bytes()
    monkeypatch.setattr(sweeps, "forecast_chunk", None)  # what is finished asks nobody
    assert run(load_sweep(GRID), out)["rows"] == 24


def test_another_sweep_is_refused_and_restart_discards_it(small_chunks: None, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    other = load_sweep({**GRID, "where": ["plan.tp * plan.pp <= 3"]})
    with pytest.raises(KeyboardInterrupt):
        run(load_sweep(GRID), out, Stopping(3))
    with pytest.raises(PlanError, match=r"rows\.parquet\.parts.*another sweep.*--restart"):
        run(other, out, Lazy())
    summary = run(other, out, Lazy(), restart=True)
    assert summary["rows"] == len(pq.read_table(out)) == 16
    with pytest.raises(PlanError, match="another sweep"):
        run(load_sweep(GRID), out, Lazy())
    whole = out.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(load_sweep(GRID), out, Stopping(3), restart=True)
    assert out.read_bytes() == whole  # until the new rows are there
    assert run(load_sweep(GRID), out, Lazy())["rows"] == 24


def test_a_file_that_the_job_names_belongs_to_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("{preset: gpt2-124m, layers: 2}")
    sweep_of_file = {"job": {**JOB, "model": "model.yaml"}, "vary": {"batch.micro": [1, 2]}}
    run(load_sweep(sweep_of_file, tmp_path), tmp_path / "out.parquet", Lazy())
    assert run(load_sweep(sweep_of_file, tmp_path), tmp_path / "out.parquet")["rows"] == 2
    (tmp_path / "model.yaml").write_text("{preset: gpt2-124m, layers: 4}")
    with pytest.raises(PlanError, match=r"another sweep; changed: file model\.yaml\. Undo"):
        run(load_sweep(sweep_of_file, tmp_path), tmp_path / "out.parquet", Lazy())


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_that_is_no_sweep_is_never_replaced(tmp_path: Path, restart: bool) -> None:
    for name, content in (("notes.txt", b"mine"), ("own.parquet", b"")):
        out = tmp_path / name
        if content:
            out.write_bytes(content)
        else:
            pq.write_table(pa.table({"a": [1]}), out)
        before = out.read_bytes()
        with pytest.raises(PlanError, match="not the result of a sweep"):
            run(sweep(vary={"plan.tp": [1]}), out, Lazy(), restart=restart)
        assert out.read_bytes() == before


def test_foreign_files_in_the_folder_of_parts_stay(tmp_path: Path) -> None:
    parts_folder(tmp_path / "out.parquet").mkdir()
    note = parts_folder(tmp_path / "out.parquet") / "note.txt"
    note.write_text("mine")
    run(sweep(vary={"plan.tp": [1]}), tmp_path / "out.parquet", Lazy())
    assert note.read_text() == "mine" and [path.name for path in note.parent.iterdir()] == ["note.txt"]


def test_a_folder_of_parts_that_no_sweep_made_is_not_emptied(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    parts_folder(out).mkdir()
    own = parts_folder(out) / "0000000.parquet"
    own.write_text("mine")
    for restart in (False, True):
        with pytest.raises(PlanError, match=r"holds 0000000\.parquet, and no sweep has made this folder"):
            run(sweep(vary={"plan.tp": [1]}), out, Lazy(), restart=restart)
        assert own.read_text() == "mine" and not out.exists()
    own.rename(tmp_path / "0000000.parquet")
    parts_folder(out).rmdir()
    parts_folder(out).symlink_to(tmp_path)
    with pytest.raises(PlanError, match="is a symbolic link to"):
        run(sweep(vary={"plan.tp": [1]}), out, Lazy())
    assert (tmp_path / "0000000.parquet").exists()


@pytest.mark.slow
def test_millions_of_points_take_little_memory(tmp_path: Path) -> None:
    of = sweep(
        vary={"run.tokens": {"range": [1, 10_000]}, "plan.tp": [1, 2], "batch.micro": [1, 2]},
        where=["run.tokens == 7", "plan.tp == 1"],
    )
    tracemalloc.start()
    summary = run(of, tmp_path / "out.parquet", Lazy())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert summary["points"] == 40_000 and summary["rows"] == 2
    assert peak < 40e6


@pytest.mark.parametrize("out", ["", ".", "/"])
def test_a_result_has_a_name(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="is not a regular file"):
        run(load_sweep(GRID), out, Lazy())
    assert not list(tmp_path.iterdir())
