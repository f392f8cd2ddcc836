"""The pages of the file formats: every field is on its page, and their examples can be read."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.hardware import cluster, inline, load_cluster, mixed
from meshcast.simulator import load_job, simulate
from meshcast.simulator.costs.calibration.cost_models import COST_MODELS
from meshcast.simulator.costs.kernel_prices import RATES
from meshcast.simulator.job import batch, job, plan_keys, run_keys
from meshcast.simulator.job.framework import (
    Bucket,
    CommunicationOverlap,
    Framework,
    LossKernels,
    ProcessMemory,
    framework_generations,
    framework_names,
    load_framework,
)
from meshcast.simulator.models.branches import Branch
from meshcast.simulator.models.huggingface import SUPPORTED
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.parts import MLA, InputConvolution, LinearAttention, ModelOutput, MoEShape, StateSpace
from meshcast.validation.calibration.collectives import tables as collectives
from meshcast.validation.calibration.kernels import tables as kernels
from meshcast.validation.published import rows
from meshcast.validation.published.answer import answer

DOCS = Path(__file__).resolve().parents[1] / "docs"


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text("utf-8")


def block(name: str, language: str, at: int = 0) -> Any:
    return yaml.safe_load(re.findall(rf"^```{language}\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)[at])


JOB = [
    job.JobFile,
    batch.Batch,
    batch.MicrobatchClass,
    batch.Samples,
    batch.LogNormal,
    batch.Uniform,
    job.Precision,
    job.RunLength,
    plan_keys.ShortPlan,
    job.LongPlan,
    job.SchemeEntry,
    job.StagePlan,
    run_keys.Failures,
    run_keys.FailingComponent,
    run_keys.Checkpoints,
    run_keys.Recovery,
    run_keys.RunStragglers,
    run_keys.SlowEpisode,
    run_keys.Evaluation,
    run_keys.DataStalls,
]
SPEC = [
    rows.Spec,
    rows.RunModel,
    rows.Degrees,
    rows.RunBatch,
    rows.Recompute,
    rows.RunOffload,
    rows.RunAdapters,
    rows.Network,
]


MADE = {"assumed", "fabric_gpus"}
"""Fields of a cluster that are not for files."""


@pytest.mark.parametrize(
    "name, models, left_out",
    [
        ("job", JOB, set()),
        ("cluster", [inline.ByGPU, inline.Inter, cluster.Fabric, cluster.Level], {"name", "title", "source"}),
        ("cluster", [cluster.Cluster, cluster.NodeGroup, mixed.ByGroups], {"name", "title", "source", *MADE}),
        ("model", [Model, Branch, MoEShape, MLA, StateSpace, LinearAttention], {"trunk_hidden"}),
        ("model", [ModelOutput, InputConvolution], set()),
        ("published-runs", [*SPEC, rows.RunOverlap, rows.PublishedRun, rows.PublishedFigures], set()),
        ("framework", [Framework], {"overlap", "bucket", "adapters", "loss", "update", "memory", "rates"}),
    ],
)
def test_every_field_is_on_its_page(name, models, left_out) -> None:
    fields = {field.alias or key for model in models for key, field in model.model_fields.items()}
    assert {field for field in fields - left_out if f"`{field}`" not in page(name)} == set()


def test_every_kind_of_config_is_on_the_page_of_the_model() -> None:
    assert all(f"`{kind}`" in page("model") for kind in SUPPORTED)


def test_every_field_of_the_answer_is_on_the_pages_of_job_and_figures() -> None:
    forecast = simulate({"model": "gpt2", "cluster": "dgx-h100:1", "plan": {"pp": 2}}).to_dict()

    def keys(answer: Any) -> set[str]:
        if isinstance(answer, list):
            return set().union(*map(keys, answer))
        return set(answer).union(*map(keys, answer.values())) if isinstance(answer, dict) else set()

    del forecast["job"]  # in the words of the page itself
    forecast["interval"]["widest"] = {}  # by keys of jobs, and kinds of work
    spans = re.findall(r"`([^`\n]+)`", page("job") + page("figures"))
    assert keys(forecast) - {word for span in spans for word in re.findall(r"\w+", span)} == set()


def test_the_short_and_the_long_plan_are_the_same() -> None:
    short, long = block("job", "yaml", 0), block("job", "yaml", 1)
    assert load_job(short).plan == load_job(short | long).plan


def test_the_batches_of_heterogeneous_length_are_forecast() -> None:
    jobs = [yaml.safe_load(one) for one in re.findall(r"^```yaml\n(.*?)^```", page("job"), re.DOTALL | re.MULTILINE)]
    heterogeneous = [one for one in jobs if {"lengths", "samples"} & (one.get("batch") or {}).keys()]
    forecasts = [simulate(one) for one in heterogeneous]
    assert [forecast.fits for forecast in forecasts] == [True, True, True, True]
    assert forecasts[0].tokens == 2 * (3 * 3500 + 3 * 4096)
    assert len(forecasts[1].play.plan.pipelines) == 2


def test_the_clusters_are_clusters() -> None:
    found = [load_cluster(block("cluster", "yaml", at)).gpus for at in range(4)]
    assert found == [1020, 1024, 96, 16]


def test_the_model_is_its_preset() -> None:
    assert load_model(block("model", "yaml") | {"name": "deepseek-v2-lite"}) == load_model("deepseek-v2-lite")


def test_the_published_run_is_forecast_without_assumptions() -> None:
    forecast = answer(rows.PublishedRun.model_validate(block("published-runs", "json")))
    assert (forecast["status"], forecast["assumed"]) == ("predicted", [])
    assert {key for key in forecast if f"`{key}`" not in page("published-runs")} == set()


def test_the_profiles_are_the_frameworks() -> None:
    shown: dict[str, set[str]] = {}
    names: list[str] = []
    for line in page("framework").splitlines():
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if cells[0] == "field":
            names = [cell for cell in cells[1:] if cell != "meaning"]
        elif line.startswith("| `") and names and len(cells) > len(names):
            field = cells[0].strip("`")
            for name, cell in zip(names, cells[-len(names) :], strict=True):
                profile = load_framework(name).model_dump(by_alias=True)
                if cell.startswith("[its file]"):
                    assert f"/{name}.yaml" in cell and profile[field]
                else:
                    assert read(cell) == value(profile, field), (name, field)
                shown.setdefault(name, set()).add(field)
        elif line.startswith("## Where"):
            names = []
    parts = {"overlap": CommunicationOverlap, "bucket": Bucket, "loss": LossKernels, "memory": ProcessMemory}
    nested = {f"{key}.{field}" for key, part in parts.items() for field in part.model_fields}
    assert sorted(shown) == sorted(framework_names())
    assert all(fields >= nested | {f"rates.{rate}" for rate in RATES} for fields in shown.values())


def test_the_releases_are_those_of_the_profiles() -> None:
    rows = {
        (cells[0].strip("`"), cells[1], cells[3])
        for line in page("framework").partition("## Releases")[2].splitlines()
        if len(cells := line.strip("| ").split(" | ")) == 4 and cells[0].startswith("`")
    }
    assert rows == {
        (name, each["until"], each["source"]) for name in framework_names() for each in framework_generations(name)
    }


def read(cell: str) -> Any:
    words = {"true": True, "false": False, "as `dp`": None, "published": None, "none": None, "{}": {}}
    return words[cell] if cell in words else float(cell) if cell[:1].isdigit() else cell


def value(profile: dict[str, Any], field: str) -> Any:
    *parts, key = field.split(".")
    for part in parts:
        profile = profile[part]
    trait = profile.get(key, 1.0) if parts else profile[key]
    return f"[{', '.join(trait)}]" if isinstance(trait, tuple) else trait


def test_every_format_of_measurements_is_on_the_page_of_calibrations() -> None:
    text = page("calibration")
    for reader in (*kernels.READERS, *collectives.READERS):
        assert all(column in text for columns in reader.COLUMNS for column in columns)
    assert all(f"`{section}`" in text for section in COST_MODELS)


def test_the_commands_of_the_page_of_calibrations_are_there() -> None:
    commands = re.findall(r"^meshcast (\w+) .*$", page("calibration"), re.MULTILINE)
    assert {"validate", "calibrate", "predict"} <= set(commands)
    for line in re.findall(r"^meshcast .*$", page("calibration"), re.MULTILINE):
        output = CliRunner().invoke(app, [line.split()[1], "--help"], env={"COLUMNS": "200"}).output
        assert all(option in output for option in re.findall(r"--[a-z-]+", line)), line
