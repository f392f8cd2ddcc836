"""``meshcast validate published``, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

from meshcast.experiments.cli import app as cli
from meshcast.experiments.render.matplotlib.measured import published as plots
from meshcast.experiments.render.terminal.forecast import render
from meshcast.experiments.render.terminal.published import fit_page
from meshcast.validation.published import answer as module
from meshcast.validation.published.rows import read_shipped
from tests.experiments.render.matplotlib.checks import draw_styled, shown_texts
from tests.validation.published.runs import answer_shipped


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["validate", "published", *map(str, words)])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped runs have the answers that were made once for all tests."""
    forecasts = {row["id"]: row for row in answer_shipped()}
    monkeypatch.setattr(module, "answer", lambda run, shared_work: forecasts[run.id])


@pytest.fixture
def answer(known: None) -> dict[str, Any]:
    result = run("--json", "--jobs", 1)
    assert result.exit_code == 0, result.output
    answered: dict[str, Any] = json.loads(result.stdout)
    return answered


def test_without_data_the_shipped_tables_are_run(answer: dict[str, Any]) -> None:
    assert [row["id"] for row in answer["rows"]] == [each.id for each in read_shipped()]
    summary = answer["summary"]
    assert summary["predicted"] == summary["compared"] == len(read_shipped()) and summary["refused"] == 0
    for key in ("median", "mean", "p90", "bias", "inside_interval", "baseline", "memory", "refusals"):
        assert summary[key] is not None
    for group in ("by_source", "by_gpu", "by_class", "by_stack"):
        assert sum(of["rows"] for of in summary[group].values()) == len(read_shipped())


def test_the_page_names_every_group_and_the_naive_forecast(answer: dict[str, Any], known: None) -> None:
    result = run("--jobs", 1)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100 and "…" not in result.stdout
    words = f"{len(read_shipped())} published runs", "korthikanti", "smith", "a100-sxm-80", "megatron-lm-2021"
    assert all(word in result.stdout for word in (*words, "naive", "blind"))
    total = next(line for line in lines if line.startswith(" all")).split()
    assert float(total[3]) == pytest.approx(100 * answer["summary"]["median"], abs=0.051)


def test_the_page_names_runs_that_do_not_fit(tmp_path: Path) -> None:
    shipped = next(one for one in read_shipped() if one.id == "korthikanti-530b-selective")
    line = shipped.model_dump(mode="json", by_alias=True)
    line["spec"] |= {"recompute": {"kind": "none"}, "grad_dtype": None}
    (tmp_path / "one.jsonl").write_text(json.dumps(line), "utf-8")
    result = run("--data", tmp_path / "one.jsonl")
    assert result.exit_code == 0 and "1 run does not fit" in result.stdout
    # Gradients in 16 bits, which it leaves open, do not help: 530B over 280 GPUs without recomputation.
    words = " ".join(result.stdout.split())
    assert "no assumed field explains it" in words and "the memory model is wrong" in words


def test_files_with_bad_lines_are_answered_in_full(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text('{"id": "x-1", "spec": {"class": "dense", "stack": "nemo"}}\nnot json\n', "utf-8")
    two.write_text('{"id": "y-1", "spec": {"class": "other", "stack": "nemo"}}\n', "utf-8")
    for words in (("--data", one, "--data", two), ("--data", one, two)):
        rows = json.loads(run(*words, "--json").stdout)["rows"]
        assert [row["id"] for row in rows] == ["x-1", None, "y-1"]
        assert "one.jsonl:2" in rows[1]["reason"] and "attention" in rows[2]["reason"]
    page = run("--data", one, two)
    assert page.exit_code == 0 and "3 refused" in page.stdout and "kind of attention" in page.stdout


def test_an_interrupted_run_prints_finished_rows(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = module.answer, []

    def stop(*words: Any) -> Any:
        if len(seen) == module.CHUNK + 1:
            raise KeyboardInterrupt
        seen.append(words)
        return real(*words)

    monkeypatch.setattr(module, "answer", stop)
    result = run("--jobs", 1, "--json")
    assert result.exit_code == 130
    assert len(json.loads(result.stdout)["rows"]) == module.CHUNK
    assert f"{len(read_shipped()) - module.CHUNK} runs are not answered" in result.stderr


# ------------------------------------------------------------------------------------------- figures


def draw(dots: list[plots.Dot]) -> Figure:
    return draw_styled(plots.compare_dots, dots, "Step time", "s", 30)


@pytest.mark.slow
def test_figures_are_drawn_into_a_folder_or_a_file(tmp_path: Path) -> None:
    some = [run.model_dump(by_alias=True) for run in read_shipped()[::8]]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, some)), "utf-8")
    plot = ("--data", tmp_path / "some.jsonl", "--plot")
    assert run(*plot, f"{tmp_path}/out/", "--jobs", 1).exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step-time.png"], "no paper prints its memory"
    read = {**some[0], "measured": {"peak_memory_gib": 40.0}}
    (tmp_path / "runs.jsonl").write_text(json.dumps(read), "utf-8")
    assert run("--data", tmp_path / "runs.jsonl", "--plot", f"{tmp_path}/both/").exit_code == 0
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["memory.png", "step-time.png"]
    assert run(*plot, tmp_path / "alone.svg", "--jobs", 1).exit_code == 0
    again = (tmp_path / "alone.svg").read_bytes()
    assert run(*plot, tmp_path / "alone.svg", "--jobs", 2).exit_code == 0
    assert (tmp_path / "alone.svg").read_bytes() == again


def test_points_of_the_plot_are_those_of_the_answers(answer: dict[str, Any]) -> None:
    dots = plots.step_time_dots(answer["rows"])
    assert [dot.predicted for dot in dots] == [row["predicted"]["step_time_s"] for row in answer["rows"]]
    assert [dot.measured for dot in dots] == pytest.approx([row["measured"]["step_time_s"] for row in answer["rows"]])
    figure = draw(dots)
    drawn = sorted(point for group in figure.axes[0].collections for point in _offsets(group))
    expected = sorted((dot.measured, dot.predicted) for dot in dots)
    assert [x for x, _ in drawn] == pytest.approx([x for x, _ in expected])
    assert [y for _, y in drawn] == pytest.approx([y for _, y in expected])
    shown = " ".join(text.get_text() for text in shown_texts(figure))
    assert f"{len(dots)} of 30 runs" in shown and "korthikanti" in shown


def test_many_sources_have_distinct_markers_inside_the_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with all pixels
    dots = [plots.Dot(f"source {i}", 10.0**i, 10.0**i * (0.01 if i else 100), 1.0, 1e9) for i in range(17)]
    looks = plots._source_looks(dots)
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == 17
    figure = draw(dots)
    low, high = figure.axes[1].get_ylim()
    assert 1 / high == pytest.approx(low) and high <= plots.FARTHEST
    edges = figure.bbox
    for text in (*figure.texts, *(label for axes in figure.axes for label in (axes.xaxis.label, axes.yaxis.label))):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= edges.x1 and box.y1 <= edges.y1, text.get_text()


def test_a_plot_without_runs_states_the_reason() -> None:
    assert "None of the 30 runs" in " ".join(text.get_text() for text in shown_texts(draw([])))


def _offsets(group: Any) -> list[tuple[float, float]]:
    kind = type(group).__name__
    return [(float(x), float(y)) for x, y in group.get_offsets()] if kind == "PathCollection" else []


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["validate", "fit", "--json", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    answered: dict[str, Any] = json.loads(result.stdout)
    return answered


@pytest.mark.slow
def test_a_fit_says_what_it_tried_and_what_it_kept(found: dict[str, Any]) -> None:
    dense = found["classes"]["dense"]
    assert found["rows"] == dense["rows"] == len(read_shipped()) and dense["sources"] == 3
    assert {trial["kind"] for trial in dense["kinds"] if trial["kept"]} == set(dense["kept"])
    assert {one["kind"] for one in dense["effects"]} == set(dense["kept"])
    # What ships is within 3 % of these runs, which leaves nothing to fit; the sources left out say how much is luck.
    errors = {name: of["median"] for name, of in dense["errors"].items()}
    assert errors["shipped"] < 0.03 and errors["all_in_sample"] < errors["all_source_left_out"]
    assert len(found["residuals"]) == 9 and found["shipped"]


@pytest.mark.slow
def test_the_page_of_a_fit_fits_its_width(found: dict[str, Any]) -> None:
    text = render(fit_page(found))
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    for words in ("source left out", "GEMMs in 16 bits", "dense, known", "rates.memory_bound: fms-fsdp, llm-foundry"):
        assert words in text


@pytest.mark.slow
def test_a_fit_lists_what_was_left_out(found: dict[str, Any]) -> None:
    text = render(fit_page(found | {"leave_out": "model"}))
    models = [one["group"] for one in found["classes"]["dense"]["left_out"]["model"]]
    assert "model left out" in text and len(models) > 3 and all(model in text for model in models)
