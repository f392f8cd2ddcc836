"""Sweeps: the points of a file, refused files, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.sweeps import run as sweeps
from meshcast.experiments.sweeps.expressions import parse_constraint
from meshcast.experiments.sweeps.grid import MISSING, Names
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.hardware.errors import PlanError
from tests.experiments.sweeps.sweeps import GRID, JOB, ROOT, Lazy, kept, points, sweep, values

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
    answers = sweeps.forecast_chunk(sweeps._make_chunk(of, 0, 4))
    assert [row["status"] for row in answers] == ["fits"] * 4
    assert answers[0]["step_time_s"] < answers[1]["step_time_s"] and answers[0]["model"] == {"preset": "gpt2-124m"}


@pytest.mark.parametrize(
    ("axis", "found"),
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
def test_values(axis: Any, found: list[Any]) -> None:
    assert values(axis) == found


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


def test_deep_expressions_are_refused_or_read() -> None:
    for text in ("not " * 240 + "true", "-" * 900 + "1 < 2", "(" * 90 + "1" + ")" * 90 + " < 2"):
        try:
            assert parse_constraint(text, "where[0]")(lambda name: 0) is True
        except PlanError as error:
            assert error.where == "where[0]"


def test_a_sweep_is_a_file_or_a_mapping() -> None:
    with pytest.raises(PlanError, match="path of a file, or a mapping"):
        load_sweep(3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no such file"):
        load_sweep("none.yaml")


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
    answer = json.loads(again.stdout)
    assert answer["status"]["fits"] == 20 and len(answer["best"]) == 10 and answer["best"][0]["plan.tp"] in (1, 2, 4)


def test_the_example_is_read() -> None:
    of = load_sweep(ROOT / "examples" / "sweep-llama3-70b.yaml")
    assert of.points == 720 and len(kept(of)) == 432


def test_the_page_of_docs_is_up_to_date(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text("utf-8")
    example = (ROOT / "examples" / "sweep-llama3-70b.yaml").read_text("utf-8")
    assert re.findall(r"```yaml\n(.*?)```", page, re.S) == [example]
    figures = (ROOT / "docs" / "figures.md").read_text("utf-8")
    columns = set(pq.read_schema(reference).names) - set(load_sweep(GRID).fields)
    assert columns <= set(re.findall(r"`(\w+)`", page[page.index("## The columns") :] + figures))
    monkeypatch.chdir(tmp_path)
    Path("results.parquet").write_bytes(reference.read_bytes())
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/sweeps.md", "exec"), {"__name__": "__main__"})
    assert len(pandas.read_parquet("small.parquet")) == 8
