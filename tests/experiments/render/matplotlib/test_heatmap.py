"""Sweeps as heatmaps, and why a cell is blank."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.render.matplotlib import heatmap, style
from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.experiments.sweeps import selection
from meshcast.experiments.sweeps.grid import load_sweep
from meshcast.experiments.sweeps.run import run
from meshcast.experiments.views.heatmap import choose_form, explain_cell, group_cells, shorten_field
from meshcast.hardware.errors import PlanError
from tests.experiments.render.matplotlib.checks import check_figure, draw_styled

SWEEP: dict[str, Any] = {
    "job": {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 16, "sequence": 8192}},
    "vary": {"plan.tp": [1, 2, 3, 8], "plan.pp": [1, 2, 4], "batch.micro": [1, 2]},
    "where": ["plan.tp * plan.pp <= 8"],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "results.parquet"
    run(load_sweep(SWEEP), out, workers=1)
    return out


def sweep_row(**changes: Any) -> dict[str, Any]:
    row = {"index": 0, "plan.tp": 1, "plan.pp": 1, "batch.micro": 1, "status": "fits", "reason": None}
    return {
        **row,
        "tokens_per_s_per_gpu": 100.0,
        "step_time_s": 1.0,
        "peak_device_gib": 50.0,
        "capacity_gib": 80.0,
    } | changes


def test_a_cell_holds_the_best_plan_that_fits() -> None:
    rows = [
        sweep_row(),
        sweep_row(**{"batch.micro": 2, "tokens_per_s_per_gpu": 120.0, "step_time_s": 0.9}),
        sweep_row(**{"batch.micro": 4, "tokens_per_s_per_gpu": 150.0, "step_time_s": 0.7, "status": "does-not-fit"}),
    ]
    (cell,) = group_cells(rows, "plan.tp", "plan.pp", "tokens_per_s_per_gpu").values()
    assert cell.best == rows[1] and cell.note == ""
    (cell,) = group_cells(rows, "plan.tp", "plan.pp", "step_time_s").values()
    assert cell.best == rows[1], "less is better"


def test_a_blank_cell_has_its_reason() -> None:
    large = sweep_row(**{"plan.tp": 2, "status": "does-not-fit", "peak_device_gib": 90.0})
    wrong = sweep_row(
        **{"plan.tp": 4, "status": "invalid", "reason": "PlanError plan.tp: no", "tokens_per_s_per_gpu": None}
    )
    found = group_cells([sweep_row(), large, wrong, wrong], "plan.tp", "plan.pp", "tokens_per_s_per_gpu")
    assert [found[tp, 1].note for tp in (1, 2, 4)] == ["", "too large", "invalid"]
    assert explain_cell(found, 2, 1) == ["needs 90.0 GiB of 80.0"]
    assert explain_cell(found, 4, 1) == ["2 x PlanError plan.tp: no"]
    assert explain_cell(found, 1, 1) == []
    assert "no plan of these" in explain_cell(found, 8, 1)[0]


@pytest.mark.parametrize(
    "words", [("plan.zz", "plan.pp", "step_time_s"), ("plan.tp", "x", "step_time_s"), ("plan.tp", "plan.pp", "limits")]
)
def test_a_field_that_the_sweep_lacks_is_refused(words: tuple[str, str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        group_cells([sweep_row()], *words)
    assert caught.value.where in ("--x", "--y", "--value") and caught.value.remedy


def test_a_real_sweep(results: Path, tmp_path: Path) -> None:
    rows = selection.read_rows(results)
    assert selection.varied_fields(rows) == ["plan.tp", "plan.pp", "batch.micro"]
    assert selection.choose_axes(rows, None, None) == ("plan.tp", "plan.pp")
    assert selection.choose_axes(rows, None, "batch.micro") == ("plan.tp", "batch.micro")
    found = group_cells(rows, "plan.tp", "plan.pp", "tokens_per_s_per_gpu")
    assert (8, 2) not in found, "left out"
    assert found[3, 1].best is None and "divide" in explain_cell(found, 3, 1)[0]
    best = max((row for row in rows if row["status"] == "fits"), key=lambda row: row["tokens_per_s_per_gpu"])
    assert found[best["plan.tp"], best["plan.pp"]].best == best
    files = [tmp_path / f"{i}.svg" for i in range(2)]
    axes = "plan.tp", "plan.pp", "tokens_per_s_per_gpu"
    for file in files:
        save(lambda: heatmap.heatmap(found, *axes, "A sweep", ["some plans"]), file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_field_that_some_plans_lack_is_drawn_first() -> None:
    rows = [
        sweep_row(**{"plan.schedule": schedule, "plan.chunks": chunks})
        for schedule, chunks in (("1f1b", None), ("interleaved-1f1b", 4), ("interleaved-1f1b", 2))
    ]
    found = group_cells(rows, "plan.schedule", "plan.chunks", "step_time_s")
    figure = draw_styled(heatmap.heatmap, found, "plan.schedule", "plan.chunks", "step_time_s", "A sweep", [])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["-", "2", "4"]
    assert selection.parse_cell("1f1b, -", rows, "plan.schedule", "plan.chunks") == ("1f1b", None)


def test_long_names_of_fields_are_shortened_where_they_are_ambiguous() -> None:
    fields = [f"framework.set.overlap.{axis}" for axis in ("tp", "dp", "pp")]
    rows = [
        sweep_row(**dict(zip(fields, flags, strict=True)), step_time_s=step)
        for flags, step in zip(product([True, False], repeat=3), (16.0, 17.8, 15.5, 19, 20, 21, 22, 23), strict=True)
    ]
    found = group_cells(rows, fields[0], fields[1], "step_time_s")
    for width in style.WIDTHS:
        figure = draw_styled(heatmap.heatmap, found, fields[0], fields[1], "step_time_s", "A", [], width=width)
        check_figure(figure, width)
        axes = figure.axes[0]
        assert axes.get_ylabel() == "overlap.dp" and axes.get_xlabel().endswith("overlap.tp")
        assert [label.get_text() for label in axes.get_xticklabels()] == ["false", "true"]
        assert "(below it: overlap.pp)" in " ".join(text.get_text() for text in figure.texts)
        assert {"16.0", "15.5"} <= {text.get_text() for text in axes.texts}, "one format"
    names = ["plan.tp", "batch.micro", "model.micro", "framework.set.launch_s"]
    assert [shorten_field(one, names) for one in names] == ["tp", "batch.micro", "model.micro", "launch_s"]


def test_numbers_of_a_plot_have_one_format() -> None:
    assert choose_form("{:,.3g}", [16.0, 17.8]) == "{:,.1f}"
    assert choose_form("{:,.3g}", [0.0012, 17.8]) == "{:,.3g}"
    assert choose_form("{:.1%}", [0.1, 0.25]) == "{:.1%}"


def test_command(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "map.png"
    done = CliRunner().invoke(app, ["plot", str(results), "--out", str(out), "--why", "3,1"])
    assert done.exit_code == 0 and out.read_bytes().startswith(b"\x89PNG") and "must divide" in done.stdout
    done = CliRunner().invoke(app, ["plot", str(results)])
    assert done.exit_code == 0 and (tmp_path / "heatmap.png").is_file()
    assert done.stdout.splitlines()[0] == "wrote heatmap.png" and "--why X,Y" in done.stdout
    one = tmp_path / "one.parquet"
    pq.write_table(pq.read_table(results, filters=[("plan.pp", "=", 1), ("batch.micro", "=", 1)]), one)
    text = tmp_path / "results.json"
    text.write_text(json.dumps(SWEEP), "utf-8")
    twice, table = tmp_path / "twice.parquet", pq.read_table(results)
    pq.write_table(table.append_column("plan.tp", table["plan.tp"]), twice)
    wrong, names = tmp_path / "wrong.parquet", table["status"]
    pq.write_table(table.set_column(table.column_names.index("step_time_s"), "step_time_s", names), wrong)
    for words, message in (
        ([str(results), "--x", "plan.tp", "--y", "plan.tp"], "it is the field of --x"),
        ([str(wrong), "--out", str(out)], "step_time_s is 'does-not-fit': it is a finite number, or empty"),
        ([str(one)], "only plan.tp takes several values. Vary a second field"),
        ([str(text), "--out", str(out)], "not a Parquet file"),
        ([str(twice), "--out", str(out)], "the column 'plan.tp' is there twice"),
        ([str(tmp_path), "--out", str(out)], "it is a folder"),
        ([str(tmp_path / "none"), "--out", str(out)], "no such file"),
        ([str(results), "--why", "3"], "it names a value"),
        ([str(results), "--why", "3,9"], "no plan.pp of 9"),
        ([str(results), "--out", str(tmp_path / "map.txt")], ".png, .svg or .pdf"),
    ):
        done = CliRunner().invoke(app, ["plot", *words])
        assert done.exit_code == 2 and message in done.stderr, words
