"""The table of figures: everything that shows a figure is made from it."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.render.terminal.forecast import page as forecast_page
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.views.heatmap import group_cells
from meshcast.simulator import Report, simulate
from meshcast.simulator.costs.power import power_model
from meshcast.simulator.costs.regimes import KERNELS_OF_A_STEP
from meshcast.simulator.program.categories import COMPUTING, EXPOSED, kind_of
from meshcast.simulator.report import figures
from meshcast.simulator.report.figures import FIGURES, Figure, nest, parts_of_step, row_of
from tools.pages.figures import page as docs_page

ROOT = Path(__file__).resolve().parents[3]
JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:1", "batch": {"global": 16},
    "plan": {"tp": 4, "pp": 2}, "run": {"tokens": 1e12, "price_per_gpu_hour": 2, "carbon_kg_per_kwh": 0.4},
}  # fmt: skip
SWEEP: dict[str, Any] = {"job": JOB, "vary": {"plan.tp": [2, 4], "plan.pp": [1, 2]}}


@pytest.fixture(scope="module")
def report() -> Report:
    return simulate(JOB)


@pytest.fixture(scope="module")
def answer(report: Report) -> dict[str, Any]:
    """The answer before anything is added."""
    return report.to_dict()


def printed(what: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=100).print(what)
    return file.getvalue()


def example() -> Figure:
    """The entry that docs/add-a-figure.md shows as a diff."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "add-a-figure.md").read_text("utf-8"), re.DOTALL)
    files, lines = (re.findall(pattern, diff, re.MULTILINE) for pattern in (r"^\+\+\+ b/(.*)$", r"^\+ (.*)$"))
    assert files == [Path(figures.__file__).resolve().relative_to(ROOT).as_posix()], "one file"
    (found,) = eval(f"({' '.join(lines)})", dict(vars(figures)))
    assert isinstance(found, Figure)
    return found


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Figure:
    figure = replace(example(), name="added")
    monkeypatch.setitem(FIGURES, figure.name, figure)
    return figure


def test_an_added_figure_is_in_the_json_answer_behind_the_others(
    answer: dict[str, Any], added: Figure, report: Report
) -> None:
    more = report.to_dict()
    assert list(more) == [*answer, added.name]
    assert more == {**answer, added.name: report.parts["bubble"] / report.step_time}
    assert more[added.name] > 0


def test_an_added_figure_is_on_the_page(added: Figure, report: Report) -> None:
    share = f"{report.parts['bubble'] / report.step_time:.1%}"
    assert re.search(rf"^bubble +{share} +`bubble_s` / `step_time_s` *$", printed(forecast_page(report)), re.MULTILINE)


def test_an_added_figure_is_a_column_of_sweeps_and_a_value_of_heatmaps(added: Figure, tmp_path: Path) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps(SWEEP), "utf-8")
    out = tmp_path / "rows.parquet"
    result = CliRunner().invoke(app, ["sweep", str(file), "--out", str(out), "--workers", "1"])
    assert result.exit_code == 0 and re.search(r"GiB +bubble %", result.stdout)
    rows = pq.read_table(out).to_pylist()
    assert str(pq.read_schema(out).field(added.name).type) == "double"
    values = {(row["plan.tp"], row["plan.pp"]): row[added.name] for row in rows}
    assert values[4, 1] == 0 < values[4, 2] == rows[3]["bubble_s"] / rows[3]["step_time_s"]
    assert group_cells(rows, "plan.tp", "plan.pp", added.name)[4, 2].best == rows[3]
    picture = tmp_path / "map.svg"
    plotted = CliRunner().invoke(app, ["plot", str(out), "--value", added.name, "--out", str(picture)])
    assert plotted.exit_code == 0 and "pipeline bubble [%], 4 plans" in picture.read_text("utf-8")


def test_an_added_figure_is_in_the_tables_of_its_places(
    added: Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIGURES, added.name, replace(added, places=("curve", "points")))
    file = tmp_path / "job.json"
    file.write_text(json.dumps(JOB), "utf-8")
    words = ["scale", str(file), "--gpus", "8,16"]
    page = CliRunner().invoke(app, words)
    assert page.exit_code == 0 and "bubble %" in page.stdout
    points = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["points"]
    assert all(0 < point[added.name] < 1 for point in points)


def test_an_added_figure_is_on_the_page_of_docs(added: Figure) -> None:
    line = f"| `{added.name}` | {added.unit} | `{added.name}` | {added.better} | {added.sentence} |"
    assert line in docs_page().splitlines()


def test_the_page_of_the_figures_is_up_to_date() -> None:
    assert (ROOT / "docs" / "figures.md").read_text("utf-8") == docs_page(), "`make docs-figures` puts it right"


@pytest.mark.slow
def test_importing_the_table_is_light() -> None:
    heavy = ("matplotlib", "pandas", "pyarrow", "rich", "scipy", "torch")
    code = f"import sys, simulator.report.figures; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_two_figures_have_one_place() -> None:
    places = [figure.where for figure in FIGURES.values()]
    assert len(set(places)) == len(places)
    inside = [(place, other) for place in places for other in places if other.startswith(f"{place}.")]
    assert not inside, "a figure has no figures below it"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_can_be_shown_in_every_place(name: str, report: Report) -> None:
    figure = FIGURES[name]
    value = figure.compute(report)
    assert figure.name == name and figure.sentence and figure.label
    assert isinstance(value, figure.kind)
    assert figure.read(report.to_dict()) == value
    assert figure.cell(value) and figure.cell(None) == ""
    assert figure.head or not {"best", "curve"} & set(figure.places)
    assert not figure.needs or figure.compute(simulate({k: v for k, v in JOB.items() if k != figure.needs})) is None


def test_the_parts_of_the_step_add_up_to_it(report: Report) -> None:
    parts = parts_of_step()
    assert set(parts) == set(report.parts)
    row = row_of(report)
    assert row == {name: FIGURES[name].read(report.to_dict()) for name in row}
    assert row["interval_low_s"] < row["step_time_s"] < row["interval_high_s"]
    assert sum(row[figure.name] for figure in parts.values()) == pytest.approx(row["step_time_s"], rel=1e-9)
    matrix_work = report.parts["gemm"] + report.parts["attention"]
    assert sum(report.costs.values()) + matrix_work == pytest.approx(report.step_time, rel=1e-9)


def test_the_columns_of_a_sweep_keep_their_names_and_order(tmp_path: Path) -> None:
    out = tmp_path / "rows.parquet"
    run(load_sweep({**SWEEP, "job": {key: JOB[key] for key in ("model", "cluster", "batch")}}), out, workers=1)
    known = [
        *("index", "plan.tp", "plan.pp", "status", "reason"),
        *("step_time_s", "interval_low_s", "interval_high_s", "tokens_per_s_per_gpu", "mfu_palm", "mfu_causal", "hfu"),
        *("peak_allocated_gib", "peak_device_gib", "capacity_gib", "host_memory_gib", "disk_gib"),
        *("gemm_s", "attention_s", "memory_bound_s"),
        *(f"exposed_{axis}_s" for axis in ("tp", "cp", "ep", "dp", "pp", "copy")),
        *("bubble_s", "optimizer_s", "host_s", "idle_s", "limits"),
    ]
    assert [name for name in pq.read_schema(out).names if name in known] == known


@pytest.mark.parametrize(("values", "answer"), [
    ([], {}),
    ([("a.b", 1), ("c", 2), ("a.d.e", 3)], {"a": {"b": 1, "d": {"e": 3}}, "c": 2}),
    ([("a.b.0", 1), ("a.b.1", 2), ("a.c", 3)], {"a": {"b": [1, 2], "c": 3}}),
])  # fmt: skip
def test_paths_make_a_nested_answer(values: list[tuple[str, int]], answer: dict[str, Any]) -> None:
    assert nest(values) == answer


def test_the_remark_of_mfu_names_the_format_whose_peak_it_counts_by() -> None:
    job = {"model": "llama3-8b", "cluster": "dgx-h100:1", "plan": {"tp": 8}}
    for compute, words in (("bf16", "of 989 TFLOP/s (bf16) a GPU"), ("fp8-tensorwise", "of 1,979 TFLOP/s (fp8) a GPU")):
        report = simulate({**job, "precision": {"compute": compute}})
        remark = FIGURES["mfu_palm"].remark(report)
        assert words in remark
        rate = float(remark.split(" of ")[0].replace(",", ""))
        assert rate == pytest.approx(report.flops_per_token("palm") * report.tokens_per_s_per_gpu / 1e12, abs=0.5)


def test_the_remark_of_a_run_has_the_prices_that_the_job_states(report: Report) -> None:
    stated, bare = (FIGURES["days"].remark(of) for of in (report, simulate({**JOB, "run": {"tokens": 1e12}})))
    assert all((words in stated, words in bare) == (True, False) for words in (", cost ", " t CO2"))
    assert ("partly assumed" in FIGURES["gpu_power_w"].remark(report)) == bool(report.energy.assumed)


def test_a_step_that_only_waits_longer_draws_the_power_of_waiting() -> None:
    """Stages of other sizes compute and send the same in all, but the smaller waits; small kernels reach no limit."""
    plan = JOB["plan"]
    even, uneven = (
        simulate({**JOB, "model": "gpt2", "plan": {**plan, "partition": layers}}) for layers in ([6, 6], [9, 3])
    )
    model, longer = power_model(even.job.cluster.gpu), uneven.step_time - even.step_time
    joules = [of.energy.gpu_watts * of.step_time for of in (even, uneven)]
    assert joules[1] - joules[0] == pytest.approx(longer * (model.idle_watts + model.waiting * model.limit), rel=1e-3)


def test_a_kind_widens_the_interval_by_its_share_and_the_errors_of_its_kernels(report: Report) -> None:
    """The mean error lies between those of the most and of the least certain kernel."""
    errors = defaultdict(list)
    for prices in (part.prices for task in report.play.program.tasks for part in task.parts):
        for op, seconds, sigma in zip(prices.block.ops, prices.seconds, prices.sigma, strict=True):
            errors[kind_of(op)] += [sigma] * (seconds > 0)
    parts = report.breakdown.parts
    busy = sum(parts[kind] for kind in (*COMPUTING, *EXPOSED))
    for kind in ("gemm", "attention", "memory_bound"):
        mean = report.sigmas[kind] * math.sqrt(KERNELS_OF_A_STEP) * busy / parts[kind]
        assert min(errors[kind]) * (1 - 1e-9) <= mean <= max(errors[kind]) * (1 + 1e-9)
