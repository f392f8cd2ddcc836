"""Sweeps: which points a file makes, what it refuses, and rows that are the same however they were made."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from experiments import store as stored
from experiments import sweep as sweeps
from experiments.cli import app
from experiments.expressions import parsed
from experiments.grid import MISSING, Names
from experiments.store import parts_of
from experiments.sweep import Sweep, load_sweep, run
from hardware.errors import MeshcastError, PlanError
from simulator import simulate

ROOT = Path(__file__).resolve().parents[2]
JOB: dict[str, Any] = {
    "model": "gpt2-124m",
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "sequence": 1024},
}
GRID: dict[str, Any] = {
    "job": JOB,
    "vary": {"plan.tp": [1, 2, 3, 4], "plan.pp": [1, 2], "batch.micro": [1, 2], "plan.recompute": ["none", "full"]},
    "where": ["plan.tp * plan.pp <= 4"],
}
"""32 points: 8 left out, 4 with a tp that 16 GPUs do not allow."""


class Lazy:
    """An executor that has a map and nothing else."""

    map = staticmethod(map)


class Whole:
    """An executor whose map answers when all is done, as multiprocessing's pools do."""

    def map(self, work: Any, tasks: Any) -> list[Any]:
        return [work(task) for task in list(tasks)]


def sweep(**keys: Any) -> Sweep:
    return load_sweep({"job": JOB, **keys})


def points(of: Sweep) -> list[dict[str, Any]]:
    return [of.point(index) for index in range(of.points)]


def kept(of: Sweep) -> list[dict[str, Any]]:
    """The points that break no constraint."""
    names = Names(of.job, of.base)
    return [point for point in points(of) if all(holds(names.at(point)) for holds in of.where)]


def values(told: Any, **job: Any) -> list[Any]:
    return [point["plan.tp"] for point in points(load_sweep({"job": {**JOB, **job}, "vary": {"plan.tp": told}}))]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "CHUNK", 4)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows of GRID, made in one go by one worker, in chunks of four."""
    out = tmp_path_factory.mktemp("reference") / "rows.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "CHUNK", 4)
        run(load_sweep(GRID), out, Lazy())
    return out


# -------------------------------------------------------------------------------------------- points


def test_a_grid_is_the_product_in_the_order_of_the_file() -> None:
    found = points(sweep(vary={"plan.tp": [2, 1], "batch.micro": [1, 2, 4]}))
    assert found == [{"plan.tp": tp, "batch.micro": micro} for tp in (2, 1) for micro in (1, 2, 4)]


def test_lists_of_zip_move_together_and_the_list_is_one_axis() -> None:
    found = points(
        sweep(
            vary={"batch.micro": [1, 2]},
            zip=[{"plan.tp": [1, 2], "plan.pp": [4, 8]}],
            list=[{"plan.recompute": "full"}, {"plan.recompute": "none", "plan.zero": 0}],
        )
    )
    assert found == [
        {"batch.micro": micro, "plan.tp": tp, "plan.pp": pp, **more}
        for micro in (1, 2)
        for tp, pp in ((1, 4), (2, 8))
        for more in ({"plan.recompute": "full"}, {"plan.recompute": "none", "plan.zero": 0})
    ]


def test_a_field_is_set_before_those_inside_it() -> None:
    of = sweep(vary={"model.layers": [2, 4], "model": [{"preset": "gpt2-124m"}, {"preset": "gpt2-355m"}]})
    assert [list(point) for point in points(of)] == [["model", "model.layers"]] * 4
    assert of.fields == ("model.layers", "model")
    answers = sweeps.answered(sweeps._chunk(of, 0, 4))
    assert [row["status"] for row in answers] == ["fits"] * 4
    assert answers[0]["step_time_s"] < answers[1]["step_time_s"] and answers[0]["model"] == {"preset": "gpt2-124m"}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ([4, 1], [4, 1]),
        ({"divisors": 12}, [1, 2, 3, 4, 6, 12]),
        ({"divisors": 36}, [1, 2, 3, 4, 6, 9, 12, 18, 36]),
        ({"divisors": 1}, [1]),
        ({"divisors": "gpus"}, [1, 2, 4, 8, 16]),
        ({"divisors": "layers"}, [1, 2, 3, 4, 6, 12]),
        ({"divisors": "model.layers"}, [1, 2, 3, 4, 6, 12]),
        ({"divisors": "batch.global"}, [1, 2, 4, 8, 16, 32, 64]),
        ({"powers": [1, 64]}, [1, 2, 4, 8, 16, 32, 64]),
        ({"powers": [3, 16]}, [4, 8, 16]),
        ({"range": [1, 4]}, [1, 2, 3, 4]),
        ({"range": [1, 16, 4]}, [1, 5, 9, 13]),
        ({"range": [0.1, 0.3, 0.1]}, [0.1, 0.2, 0.3]),
        ({"range": [2, 2, 1]}, [2]),
    ],
)
def test_values(told: Any, found: list[Any]) -> None:
    assert values(told) == found


def test_whole_ranges_stay_whole() -> None:
    assert all(isinstance(value, int) for value in values({"range": [1, 9, 2]}))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("plan.tp * plan.pp <= gpus", lambda tp, pp: tp * pp <= 16),
        ("gpus % (plan.tp * plan.pp) == 0", lambda tp, pp: 16 % (tp * pp) == 0),
        ("1 < plan.tp < 8 and plan.pp != 3", lambda tp, pp: 1 < tp < 8 and pp != 3),
        ("not plan.tp > plan.pp or plan.tp == 8", lambda tp, pp: tp <= pp or tp == 8),
        ("plan.tp ** 2 - plan.pp // 2 >= -layers", lambda tp, pp: tp**2 - pp // 2 >= -12),
        ("batch.global % (plan.tp + plan.pp) == 0", lambda tp, pp: 64 % (tp + pp) == 0),
        ("plan.tp == 1 or plan.pp % (plan.tp - 1) == 0", lambda tp, pp: tp == 1 or pp % (tp - 1) == 0),
        ("cluster == 'dgx-h100:2' and true", lambda tp, pp: True),
        ('cluster == "a.global" or false', lambda tp, pp: False),
        ("model.heads % plan.tp == 0 and model.hidden > 1e2", lambda tp, pp: 12 % tp == 0),
    ],
)
def test_where(text: str, holds: Any) -> None:
    grid = [(tp, pp) for tp in (1, 2, 3, 8) for pp in (1, 2, 3)]
    found = kept(sweep(vary={"plan.tp": [1, 2, 3, 8], "plan.pp": [1, 2, 3]}, where=[text]))
    assert [(point["plan.tp"], point["plan.pp"]) for point in found] == [pair for pair in grid if holds(*pair)]


def test_gpus_and_layers_are_those_of_the_point() -> None:
    axes = {"cluster": ["dgx-h100:1", "dgx-h100:4"], "model": ["gpt2-124m", {"preset": "gpt2-355m", "layers": 20}]}
    found = kept(sweep(vary=axes, where=["gpus == 32", "layers == 20"]))
    assert found == [{"cluster": "dgx-h100:4", "model": {"preset": "gpt2-355m", "layers": 20}}]


def test_a_name_inside_a_varied_mapping() -> None:
    of = sweep(vary={"plan": [{"tp": 2}, {"tp": 4}, {"pp": 2}]})
    names = Names({**JOB, "plan": {"tp": 8}}, Path("."))
    assert [names.find("plan.tp", point) for point in points(of)] == [2, 4, MISSING]
    assert names.find("plan.tp", {}) == 8


def test_a_job_file_is_found_from_the_sweep_and_its_paths_from_it(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "model.yaml").write_text("{preset: gpt2-124m, layers: 2}")
    (tmp_path / "jobs" / "job.yaml").write_text('{model: model.yaml, cluster: "dgx-h100:1"}')
    (tmp_path / "sweep.json").write_text(json.dumps({"job": "jobs/job.yaml", "vary": {"plan.tp": {"powers": [1, 2]}}}))
    of = load_sweep(tmp_path / "sweep.json")
    assert of.base == tmp_path / "jobs" and of.points == 2
    assert run(of, tmp_path / "out.parquet", Lazy())["status"]["fits"] == 2


# ------------------------------------------------------------------------------------- what is refused

START = "job: {model: gpt2-124m, cluster: 'dgx-h100:2', batch: {global: 64}}\n"
WRONG: list[tuple[str, str, str]] = [
    ("", "sweep.yaml", "a sweep is a mapping"),
    ("[1]", "sweep.yaml", "a sweep is a mapping"),
    ("a: [", "sweep.yaml", "not valid YAML"),
    ("vary: {plan.tp: [1]}", "sweep.yaml:1 job", "needed and missing"),
    (START, "sweep.yaml", "nothing varies"),
    (START + "vary: [1]", "sweep.yaml:2 vary", "mapping"),
    (START + "varies: {plan.tp: [1]}", "sweep.yaml:2 varies", "Did you mean 'vary'"),
    (START + "vary:\n  plan.tp: []", "sweep.yaml:3 vary.plan.tp", "no values"),
    (START + "vary:\n  plan.tp: 4", "sweep.yaml:3 vary.plan.tp", "values are a list"),
    (START + "vary: {plan.tp: {fibonacci: 4}}", "sweep.yaml:2 vary.plan.tp", "divisors"),
    (START + "vary: {plan.tp: {powers: [1, 2], divisors: 4}}", "sweep.yaml:2 vary.plan.tp", "values are a list"),
    (START + "vary: {plan.tpp: [1]}", "sweep.yaml:2 vary.plan.tpp", "no such field"),
    (START + "vary: {btach.micro: [1]}", "sweep.yaml:2 vary.btach.micro", "Did you mean 'batch'"),
    (START + "vary: {batch.macro: [1]}", "sweep.yaml:2 vary.batch.macro", "Did you mean 'micro'"),
    (START + "vary: {plan..tp: [1]}", "sweep.yaml:2 vary.plan..tp", "dots between"),
    (START + "vary: {1: [1]}", "sweep.yaml:2", "text"),
    (START + "vary: {plan.tp: [1, 2, 1]}", "sweep.yaml:2 vary.plan.tp[2] is 1", "given twice"),
    (START + "vary: {plan.tp: [1, .nan]}", "sweep.yaml:2 vary.plan.tp[1] is nan", "finite"),
    (START + "vary: {plan.tp: [-.inf]}", "sweep.yaml:2 vary.plan.tp[0] is -inf", "finite"),
    (START + "vary: {plan.tp: [2026-11-21]}", "sweep.yaml:2 vary.plan.tp[0]", "quotes"),
    (START + f"vary: {{plan.tp: [{10**30}]}}", "sweep.yaml:2 vary.plan.tp[0]", "at most"),
    (START + "vary: {model: [{1: 2}]}", "sweep.yaml:2 vary.model[0]", "keys must be text"),
    (START + "vary: {plan.tp: {divisors: 0}}", "sweep.yaml:2 vary.plan.tp.divisors is 0", "from 1 to"),
    (START + "vary: {plan.tp: {divisors: -8}}", "sweep.yaml:2 vary.plan.tp.divisors is -8", "from 1 to"),
    (START + f"vary: {{plan.tp: {{divisors: {10**13}}}}}", "sweep.yaml:2 vary.plan.tp.divisors", "from 1 to"),
    (START + "vary: {plan.tp: {divisors: 1.5}}", "sweep.yaml:2 vary.plan.tp.divisors", "from 1 to"),
    (START + "vary: {plan.tp: {divisors: true}}", "sweep.yaml:2 vary.plan.tp.divisors", "from 1 to"),
    (START + "vary: {plan.tp: {divisors: nodes}}", "sweep.yaml:2 vary.plan.tp.divisors", "gpus, layers"),
    (
        START + "vary: {cluster: ['dgx-h100:1'], plan.tp: {divisors: gpus}}",
        "sweep.yaml:2 vary.plan.tp.divisors is 'gpus'",
        "as cluster varies",
    ),
    (START + "vary: {plan.tp: {powers: [1]}}", "sweep.yaml:2 vary.plan.tp.powers", "list of 2 numbers"),
    (START + "vary: {plan.tp: {powers: [8, 1]}}", "sweep.yaml:2 vary.plan.tp.powers", "no power of two from 8 to 1"),
    (START + "vary: {plan.tp: {powers: [0, 8]}}", "sweep.yaml:2 vary.plan.tp.powers", "above 0"),
    (START + "vary: {plan.tp: {range: [1, 8, 0]}}", "sweep.yaml:2 vary.plan.tp.range", "goes up"),
    (START + "vary: {plan.tp: {range: [8, 1]}}", "sweep.yaml:2 vary.plan.tp.range", "goes up"),
    (START + "vary: {plan.tp: {range: [1, .inf]}}", "sweep.yaml:2 vary.plan.tp.range[1]", "finite"),
    (START + "vary: {plan.tp: {range: [1, many]}}", "sweep.yaml:2 vary.plan.tp.range", "2 or 3 numbers"),
    (START + "vary: {plan.tp: {range: [1, 1e9]}}", "sweep.yaml:2 vary.plan.tp.range", "more than 100,000 values"),
    (
        START + "vary: {plan.tp: {range: [1, 9999]}, plan.pp: {range: [1, 9999]}}",
        "sweep.yaml",
        "9,999 x 9,999 = 99,980,001 points",
    ),
    (START + "zip: [{plan.tp: [1, 2], plan.pp: [1]}]", "sweep.yaml:2 zip[0]", "plan.tp has 2, plan.pp has 1"),
    (START + "zip: [{}]", "sweep.yaml:2 zip[0]", "there are none"),
    (START + "zip: {plan.tp: [1]}", "sweep.yaml:2 zip", "must be a list"),
    (START + "zip: [{plan.tp: 1}]", "sweep.yaml:2 zip[0].plan.tp", "must be a list"),
    (START + "vary: {plan.tp: [1]}\nzip: [{plan.tp: [1]}]", "sweep.yaml:3 zip[0].plan.tp", "varies in"),
    (START + "vary: {plan.tp: [1]}\nlist: [{plan.tp: 1}]", "sweep.yaml:3 list", "varies in"),
    (START + "list: []", "sweep.yaml:2 list", "no values"),
    (START + "list: [3]", "sweep.yaml:2 list[0]", "mapping"),
    (START + "vary: {model.layers: [2]}", "sweep.yaml:2 vary.model.layers is 2", "model holds no fields"),
    ("job: no.yaml\nvary: {plan.tp: [1]}", "sweep.yaml:1 job", "no such file"),
    ("job: 3\nvary: {plan.tp: [1]}", "sweep.yaml:1 job is 3", "a job is a mapping"),
    ("job: {model: gpt2}\nvary: {plan.tp: [1]}", "sweep.yaml:1 job.cluster", "needed and missing"),
    (
        "job:\n  model: gpt2\n  cluster: dgx-h100:1\n  batch: {micr: 1}\nvary: {plan.tp: [1]}",
        "sweep.yaml:4 job.batch.micr",
        "Did you mean 'micro'",
    ),
]
TP = START + "vary: {plan.tp: [1, 2], plan.recompute: [none, full]}\nwhere:\n- "
WRONG += [
    (TP + (json.dumps(text) if isinstance(text, str) else str(text)), "sweep.yaml:4 where[0]", words)
    for text, words in [
        (3, "must be text"),
        ("plan.tp <", "cannot be read"),
        ("plan.tp", "plan.tp is 1, neither true nor false"),
        ("plan.tp + 1", "says yes or no"),
        ("plan.tp / 2 < 3", "/ is no operator"),
        ("plan.tp in [1]", "no comparisons"),
        ("plan.tp < [1]", "only plain arithmetic"),
        ("open('x') == 1", "only plain arithmetic"),
        ("__import__('os').getcwd() == 1", "only plain arithmetic"),
        ("(lambda: 1)() == 1", "only plain arithmetic"),
        ("plan.tp.real.__class__ == 1", "neither a field"),
        ("plan.pp < 8", "neither a field of the job nor known: plan.pp"),
        ("plan.tq < 8", "Did you mean 'plan.tp'"),
        ("plan.recompute < 8", "'none' is no number"),
        ("8 % (plan.tp - 1) == 0", "modulo"),
        ("9 ** 9 ** 9 > plan.tp", "more than 4,096 bits"),
        ("(-8) ** 0.5 > plan.tp", "root of a negative"),
        ("1e999 > plan.tp", "finite"),
        ("'a' * 9 == plan.tp", "no number"),
        ("plan.tp < 1j", "only plain arithmetic"),
        ("(" * 900, "cannot be read"),
        ("1 < 2 and " * 200 + "true", "at most 1,000"),
        ("1 < 2\n< 3", "one line"),
    ]
]


@pytest.mark.parametrize(("text", "where", "words"), WRONG)
def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, where: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(text)
    result = CliRunner().invoke(app, ["sweep", "sweep.yaml", "--out", "out.parquet"])
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith(f"meshcast: {where}"), result.stderr
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_deep_expressions_are_refused_or_read() -> None:
    for text in ("not " * 240 + "true", "-" * 900 + "1 < 2", "(" * 90 + "1" + ")" * 90 + " < 2"):
        try:
            assert parsed(text, "where[0]")(lambda name: 0) is True
        except PlanError as error:
            assert error.where == "where[0]"


def test_a_sweep_is_a_file_or_a_mapping() -> None:
    with pytest.raises(PlanError, match="path of a file, or a mapping"):
        load_sweep(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no such file"):
        load_sweep("none.yaml")


# ---------------------------------------------------------------------------------------------- rows


def test_rows_are_the_answers_of_predict(reference: Path) -> None:
    of = load_sweep(GRID)
    rows = pq.read_table(reference).to_pylist()
    assert [row["index"] for row in rows] == [i for i in range(32) if of.point(i) in kept(of)]
    assert {row["status"] for row in rows} == {"fits", "invalid"}
    for row in rows:
        point = of.point(row["index"])
        assert {name: row[name] for name in of.fields} == point
        plan = {key: point[f"plan.{key}"] for key in ("tp", "pp", "recompute")}
        job = {**JOB, "batch": {**JOB["batch"], "micro": point["batch.micro"]}, "plan": plan}
        if row["status"] == "invalid":
            with pytest.raises(MeshcastError) as refused:
                simulate(job)
            assert row["reason"] == f"PlanError {refused.value.where}: {refused.value.rule}"
            assert row["step_time_s"] is None and row["limits"] is None
            continue
        told = simulate(job).to_dict()
        assert row["step_time_s"] == told["step_time_s"] and row["hfu"] == told["hfu"]
        assert [row["interval_low_s"], row["interval_high_s"]] == told["interval_90_s"]
        assert row["peak_device_gib"] == told["memory"]["peak_device_gib"] and row["limits"] == told["limits"]
        parts = stored.FIGURES[stored.FIGURES.index("gemm_s") :]
        assert sum(row[part] for part in parts) == pytest.approx(row["step_time_s"], rel=1e-9)
        assert row["exposed_dp_s"] == told["breakdown_s"]["exposed"]["dp"] and row["reason"] is None


def test_what_does_not_fit_is_a_row_with_all_its_figures(tmp_path: Path) -> None:
    of = load_sweep({"job": {"model": "llama3-70b", "cluster": "dgx-h100:1"}, "vary": {"plan.tp": [8]}})
    told = run(of, tmp_path / "out.parquet", Lazy())
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row["status"] == "does-not-fit" and row["peak_device_gib"] > row["capacity_gib"]
    assert told["status"] == {"fits": 0, "does-not-fit": 1, "invalid": 0} and told["best"] == []


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
    told = run(of, tmp_path / "out.parquet", Lazy())
    table = pq.read_table(tmp_path / "out.parquet")
    kinds = [str(table.schema.field(name).type) for name in of.fields]
    assert kinds == ["bool", "double", "int64", "string", "string", "int64"]
    assert set(table["model"].to_pylist()) == {"gpt2-124m", '{"preset": "gpt2-355m"}'}
    assert table["plan.recompute"].to_pylist()[:2] == ["full", None]
    assert table["run.tokens"].to_pylist()[0] == 1.0 and table["days"].to_pylist()[-1] > 0
    assert told["status"]["fits"] == 16
    frame = pandas.read_parquet(tmp_path / "out.parquet")
    assert len(frame) == 16 and frame["step_time_s"].min() > 0


def test_a_point_that_a_constraint_cannot_tell_is_a_row_with_the_reason(tmp_path: Path) -> None:
    of = sweep(vary={"plan.tp": [2, 1]}, where=["8 % (plan.tp - 1) == 0"])
    told = run(of, tmp_path / "out.parquet", Lazy())
    assert told["status"]["invalid"] == 1 and "sweep.where[0]: integer modulo by zero" in told["invalid"][0]["reason"]


def test_a_model_that_is_unknown_costs_its_points_only(tmp_path: Path) -> None:
    of = sweep(vary={"model": ["no-model", "gpt2-124m"]}, where=["layers == 12"])
    told = run(of, tmp_path / "out.parquet", Lazy())
    assert told["status"] == {"fits": 1, "does-not-fit": 0, "invalid": 1}
    assert told["invalid"][0]["reason"].startswith("ModelError model: no preset")


def test_a_defect_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(job: Any, **_: Any) -> Any:
        if job.batch.micro == 2:
            raise ZeroDivisionError("oh")
        return simulate(job)

    monkeypatch.setattr(sweeps, "simulate", failing)
    told = run(sweep(vary={"batch.micro": [1, 2, 4]}), tmp_path / "out.parquet", Lazy())
    assert told["status"]["fits"] == 2
    assert told["invalid"] == [{"count": 1, "reason": "meshcast failed: ZeroDivisionError: oh"}]


def test_the_summary(reference: Path, small_chunks: None) -> None:
    told = run(load_sweep(GRID), reference)
    assert told["points"] == 32 and told["excluded"] == 8 and told["rows"] == 24
    assert told["status"] == {"fits": 20, "does-not-fit": 0, "invalid": 4}
    rows = [row for row in pq.read_table(reference).to_pylist() if row["status"] == "fits"]
    rows.sort(key=lambda row: (-row["tokens_per_s_per_gpu"], row["index"]))
    assert [row["index"] for row in told["best"]] == [row["index"] for row in rows[:10]]
    assert [one["count"] for one in told["invalid"]] == [4]
    assert "tp x pp = 3 x 1 = 3 must divide the 16 GPUs" in told["invalid"][0]["reason"]


def test_reasons_that_differ_in_numbers_only_are_one(tmp_path: Path) -> None:
    told = run(sweep(vary={"plan.tp": [3, 5, 7, 1]}), tmp_path / "out.parquet", Lazy())
    assert [one["count"] for one in told["invalid"]] == [3]
    assert told["invalid"][0]["reason"].startswith("PlanError plan.tp: tp x pp = 3 x 1 = 3")


# ----------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    workers: int, reference: Path, small_chunks: None, tmp_path: Path
) -> None:
    seen: list[int] = []
    out = tmp_path / "rows.parquet"
    run(load_sweep(GRID), out, workers=workers, watch=lambda done, points: seen.append(done))
    assert out.read_bytes() == reference.read_bytes()
    assert seen == list(range(0, 33, 4)) and not parts_of(out).exists()


@pytest.mark.parametrize("executor", [Lazy(), Whole(), ThreadPoolExecutor(3)], ids=["lazy", "whole", "threads"])
@pytest.mark.parametrize("window", [1, 3, 128])
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


def test_what_is_kept_is_not_forecast_again(
    reference: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.parquet"
    for after, kept in ((0, 0), (3, 3), (1, 4), (0, 4)):
        with pytest.raises(KeyboardInterrupt):
            run(load_sweep(GRID), out, Stopping(after))
        assert not out.exists() and len(list(parts_of(out).glob("*.parquet"))) == kept
    frame = pandas.read_parquet(parts_of(out))  # what is there may be read
    assert len(frame) == len(pq.read_table(reference).to_pandas().query("index < 16"))
    asked: list[int] = []

    class Counting(Lazy):
        def map(self, work: Any, tasks: Any) -> Any:  # type: ignore[override]
            tasks = list(tasks)
            asked.extend(task.start for task in tasks)
            return map(work, tasks)

    run(load_sweep(GRID), out, Counting())
    assert asked == [16, 20, 24, 28]
    assert out.read_bytes() == reference.read_bytes()
    monkeypatch.setattr(sweeps, "answered", None)  # what is finished asks nobody
    assert run(load_sweep(GRID), out)["rows"] == 24


def test_another_sweep_is_refused_and_restart_discards_it(small_chunks: None, tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    other = load_sweep({**GRID, "where": ["plan.tp * plan.pp <= 3"]})
    with pytest.raises(KeyboardInterrupt):
        run(load_sweep(GRID), out, Stopping(3))
    with pytest.raises(PlanError, match=r"rows\.parquet\.parts.*another sweep.*--restart"):
        run(other, out, Lazy())
    told = run(other, out, Lazy(), restart=True)
    assert told["rows"] == len(pq.read_table(out)) == 16
    with pytest.raises(PlanError, match="another sweep"):
        run(load_sweep(GRID), out, Lazy())
    whole = out.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        run(load_sweep(GRID), out, Stopping(3), restart=True)
    assert out.read_bytes() == whole  # until the new rows are there
    assert run(load_sweep(GRID), out, Lazy())["rows"] == 24


def test_a_file_that_the_job_names_belongs_to_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("{preset: gpt2-124m, layers: 2}")
    told = {"job": {**JOB, "model": "model.yaml"}, "vary": {"batch.micro": [1, 2]}}
    run(load_sweep(told, tmp_path), tmp_path / "out.parquet", Lazy())
    assert run(load_sweep(told, tmp_path), tmp_path / "out.parquet")["rows"] == 2
    (tmp_path / "model.yaml").write_text("{preset: gpt2-124m, layers: 4}")
    with pytest.raises(PlanError, match="another sweep"):
        run(load_sweep(told, tmp_path), tmp_path / "out.parquet", Lazy())


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_no_sweep_is_never_replaced(tmp_path: Path, restart: bool) -> None:
    for name, content in (("notes.txt", b"mine"), ("own.parquet", b"")):
        out = tmp_path / name
        if content:
            out.write_bytes(content)
        else:
            pq.write_table(pa.table({"a": [1]}), out)
        before = out.read_bytes()
        with pytest.raises(PlanError, match="no sweep's result"):
            run(sweep(vary={"plan.tp": [1]}), out, Lazy(), restart=restart)
        assert out.read_bytes() == before


def test_what_others_keep_beside_the_parts_stays(tmp_path: Path) -> None:
    parts_of(tmp_path / "out.parquet").mkdir()
    note = parts_of(tmp_path / "out.parquet") / "note.txt"
    note.write_text("mine")
    run(sweep(vary={"plan.tp": [1]}), tmp_path / "out.parquet", Lazy())
    assert note.read_text() == "mine" and [path.name for path in note.parent.iterdir()] == ["note.txt"]


def test_millions_of_points_take_little_memory(tmp_path: Path) -> None:
    of = sweep(
        vary={"run.tokens": {"range": [1, 10_000]}, "plan.tp": [1, 2], "batch.micro": [1, 2]},
        where=["run.tokens == 7", "plan.tp == 1"],
    )
    tracemalloc.start()
    told = run(of, tmp_path / "out.parquet", Lazy())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told["points"] == 40_000 and told["rows"] == 2
    assert peak < 40e6


# --------------------------------------------------------------------------- what stops a real process

KILLED = """\
import sys
from experiments import sweep
sweep.CHUNK = 4
from experiments.cli import main
main()
"""


def process(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    (folder / "sweep.json").write_text(json.dumps(GRID))
    command = [sys.executable, "-c", KILLED, "sweep", str(folder / "sweep.json"), "--out", str(folder / "rows.parquet")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(folder: Path, parts: int, at_work: subprocess.Popen[bytes]) -> None:
    """Until so many parts are there, or the process has ended."""
    while at_work.poll() is None and len(list(folder.glob("rows.parquet.parts/0*"))) < parts:
        time.sleep(0.001)


def killed_and_resumed(seed: int, folder: Path) -> bytes:
    moments = random.Random(seed)
    for _ in range(moments.choice((1, 1, 2))):
        at_work = process(folder, "--workers", str(moments.choice((1, 2))))
        wait_for(folder, moments.randrange(9), at_work)
        time.sleep(moments.random() * 0.1)
        at_work.send_signal(signal.SIGKILL)
        at_work.communicate()
    last = process(folder, "--workers", "2")
    _, told = last.communicate(timeout=300)
    assert last.returncode == 0, told
    assert sorted(path.name for path in folder.iterdir()) == ["rows.parquet", "sweep.json"]
    return (folder / "rows.parquet").read_bytes()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 25))])
def test_killed_at_any_moment_it_goes_on(seed: int, reference: Path, tmp_path: Path) -> None:
    # The name of the sweep's file is in no row: what a file and what a mapping says is the same sweep.
    assert killed_and_resumed(seed, tmp_path) == reference.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_no_worker_outlives_its_killed_parent(tmp_path: Path) -> None:
    at_work = process(tmp_path, "--workers", "2")
    wait_for(tmp_path, 1, at_work)
    workers = Path(f"/proc/{at_work.pid}/task/{at_work.pid}/children").read_text().split()
    at_work.kill()
    at_work.communicate()
    for _ in range(1000):
        if not any(_alive(worker) for worker in workers):
            break
        time.sleep(0.01)
    assert len(workers) == 2 and not any(_alive(worker) for worker in workers)


def _alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a signal to a group")
def test_ctrl_c_says_how_to_go_on(reference: Path, tmp_path: Path) -> None:
    at_work = process(tmp_path, "--workers", "2")
    wait_for(tmp_path, 2, at_work)
    at_work.send_signal(signal.SIGINT)
    _, told = at_work.communicate(timeout=300)
    assert at_work.returncode == 130
    assert told.decode().startswith("meshcast: interrupted, ") and "the same command goes on" in told.decode()
    assert len(told.splitlines()) == 1 and not (tmp_path / "rows.parquet").exists()
    assert process(tmp_path).wait(timeout=300) == 0
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_two_processes_do_not_write_the_same_file(reference: Path, tmp_path: Path) -> None:
    first = process(tmp_path, "--workers", "1")
    wait_for(tmp_path, 1, first)
    second = process(tmp_path, "--workers", "1")
    _, told = second.communicate(timeout=300)
    assert first.wait(timeout=300) == 0
    # Whichever came late: refused while the other was at work, or answered from what it had made.
    assert second.returncode in (0, 2) and (second.returncode == 0 or b"another process" in told)
    assert (tmp_path / "rows.parquet").read_bytes() == reference.read_bytes()


@pytest.mark.parametrize(("flushes", "kept"), [(1, ""), (3, ""), (5, "; 4 of 32 "), (18, "; 32 of 32 ")])
def test_a_full_disk_ends_in_one_message_and_keeps_the_rows(
    flushes: int, kept: str, reference: Path, small_chunks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(GRID))
    out = tmp_path / "rows.parquet"
    room, flush = [flushes], os.fsync

    def fsync(file: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    monkeypatch.setattr(stored.os, "fsync", fsync)
    words = ["sweep", str(tmp_path / "sweep.json"), "--out", str(out), "--workers", "1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert f"cannot be written (No space left on device){kept}" in result.stderr
    assert ("points are kept" in result.stderr) == bool(kept) and not out.exists()
    room[0] = 1000
    assert CliRunner().invoke(app, words).exit_code == 0
    assert out.read_bytes() == reference.read_bytes()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setattr(sweeps, "answered", None)
    with pytest.raises(PlanError, match="Permission denied"):
        run(load_sweep(GRID), tmp_path / "rows.parquet", Lazy())


def test_a_folder_that_is_not_there_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "answered", None)
    for out in (tmp_path / "none" / "rows.parquet", tmp_path):
        with pytest.raises(PlanError, match=r"--out"):
            run(load_sweep(GRID), out, Lazy())


class Dying:
    """What ends the process of whoever unpacks it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_worker_that_dies_ends_in_one_message(small_chunks: None, tmp_path: Path) -> None:
    of = load_sweep(GRID)
    deadly = Sweep({**of.job, "id": Dying()}, of.base, of.axes, of.where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "fingerprint", lambda *_: "same")
        with pytest.raises(PlanError, match="a worker has died"):
            run(deadly, tmp_path / "rows.parquet", workers=2)


# ------------------------------------------------------------------------------------------- command


def test_the_command_prints_a_page_and_json(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(GRID))
    words = ["sweep", str(tmp_path / "sweep.json"), "--out", str(tmp_path / "rows.parquet"), "--workers", "1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and result.stderr == ""
    assert "32 points: 20 fit, 0 do not fit, 4 invalid, 8 left out" in result.stdout
    assert "tokens/s/GPU" in result.stdout and "must divide the 16 GPUs" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    again = CliRunner().invoke(app, [*words, "--json"])
    told = json.loads(again.stdout)
    assert told["status"]["fits"] == 20 and len(told["best"]) == 10 and told["best"][0]["plan.tp"] in (1, 2, 4)


def test_the_example_is_read() -> None:
    of = load_sweep(ROOT / "examples" / "sweep-llama3-70b.yaml")
    assert of.points == 720 and len(kept(of)) == 432


def test_the_page_of_docs_tells_what_is(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text("utf-8")
    example = (ROOT / "examples" / "sweep-llama3-70b.yaml").read_text("utf-8")
    assert re.findall(r"```yaml\n(.*?)```", page, re.S) == [example]
    columns = {"index", "status", "reason", *stored.FIGURES, *stored.RUN, "limits"}
    assert columns <= set(re.findall(r"`(\w+)`", page[page.index("## The columns") :]))
    monkeypatch.chdir(tmp_path)
    Path("results.parquet").write_bytes(reference.read_bytes())
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/sweeps.md", "exec"), {"__name__": "__main__"})
    assert len(pandas.read_parquet("small.parquet")) == 8
