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
    (START + "vary: {plan.partition: [[1, .nan]]}", "sweep.yaml:2 vary.plan.partition[0][1] is nan", "finite"),
    (START + "vary: {plan.tp: [-.inf]}", "sweep.yaml:2 vary.plan.tp[0] is -inf", "finite"),
    (START + f"vary: {{plan.tp: [{10**30}]}}", "sweep.yaml:2 vary.plan.tp[0]", "at most"),
    (START + "vary: {model: [{1: 2}]}", "sweep.yaml:2 vary.model[0]", "keys must be text"),
    (START + "vary: {plan.tp: {divisors: 0}}", "sweep.yaml:2 vary.plan.tp.divisors is 0", "from 1 to"),
    (START + "vary: {plan.tp: {divisors: -8}}", "sweep.yaml:2 vary.plan.tp.divisors is -8", "from 1 to"),
    (START + f"vary: {{plan.tp: {{divisors: {10**12 + 1}}}}}", "sweep.yaml:2 vary.plan.tp.divisors", "from 1 to"),
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
    (START + "vary: {cluster.gpus: [2]}", "sweep.yaml:2 vary.cluster.gpus is 2", "cluster holds no fields"),
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
def test_invalid_sweeps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, where: str, words: str
) -> None:
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
