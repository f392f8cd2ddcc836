"""``meshcast schema``: valid schemas, which accept and refuse the same files as meshcast."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from meshcast.experiments.cli.commands import COMMANDS, find_options
from meshcast.experiments.schema import KINDS, options_schema, schema
from meshcast.hardware import clusters, load_cluster
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.hardware.load import read_yaml
from meshcast.simulator import load_job
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.job.job import JobFile
from meshcast.simulator.models.load import presets
from tests.draws import drawn
from tests.golden.rewrite import names, stored
from tests.strategies import examples, jobs
from tests.test_contract_examples import LONG, SHORT

ROOT = Path(__file__).resolve().parents[2]


@cache
def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(schema(kind))


def mistakes(kind: str, document: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator(kind).iter_errors(document)]


@pytest.mark.parametrize("kind", drawn(KINDS, keep=lambda kind: kind != "sweep"))  # that of jobs, and two fields
def test_it_is_a_schema(kind: str) -> None:
    made = schema(kind)
    Draft202012Validator.check_schema(made)
    assert made["$schema"].endswith("2020-12/schema") and json.loads(json.dumps(made)) == made
    text = json.dumps(made)
    assert all(f'"#/$defs/{name}"' in text for name in made["$defs"])
    assert made["$defs"].keys() == {word.split('"')[0] for word in text.split('"#/$defs/')[1:]}


def test_an_unknown_kind_points_to_the_nearest() -> None:
    with pytest.raises(PlanError, match="Did you mean 'cluster'"):
        schema("clusters")


def test_it_names_all_presets_schemes_and_catalog_entries() -> None:
    made = schema("job")
    assert made["properties"].keys() == JobFile.model_fields.keys()
    parts = made["$defs"]
    assert [one["properties"]["use"]["const"] for one in parts["scheme"]["anyOf"]] == scheme_names()
    for use, one in zip(scheme_names(), parts["scheme"]["anyOf"], strict=True):
        assert one["properties"].keys() == {"use", "over", *find_scheme(use).Options.model_fields}
    assert set(presets()) < set(parts["model"]["anyOf"][0]["examples"])
    assert {"dgx-h100:1", *clusters()} < set(parts["cluster"]["anyOf"][0]["examples"])
    assert "GPUs / (tp pp cp)" in parts["ShortPlan"]["properties"]["dp"]["description"]
    assert parts["Batch"]["properties"]["global"]["description"].startswith("Default:")


EXAMPLES = [path for path in ROOT.glob("examples/*.yaml") if not path.name.startswith("search-")]
EXAMPLES += ROOT.glob("examples/benchmark/*.yaml")
"""Jobs and sweeps; fields of a search may be open."""


@pytest.mark.parametrize("text", [SHORT, LONG, *(path.read_text("utf-8") for path in EXAMPLES)])
def test_the_examples_are_accepted(text: str) -> None:
    fields = read_yaml(text).data
    assert mistakes("sweep" if "vary" in fields else "job", fields) == []


def test_the_golden_jobs_are_accepted() -> None:
    for name in drawn(names(), keep=3):
        job = stored(name).job
        assert isinstance(job, str) or mistakes("job", job) == [], name  # text: an example's path


def test_shipped_files_are_accepted() -> None:
    for path in (ROOT / "simulator" / "models" / "presets").glob("*.yaml"):
        assert mistakes("model", read_yaml(path).data) == [], path
    for path in (ROOT / "hardware" / "catalog" / "clusters").glob("*.yaml"):
        assert mistakes("cluster", read_yaml(path).data) == [], path
    for file in resources.files("meshcast.validation.published").joinpath("shipped").iterdir():
        for row in read_yaml(file).data["rows"] if file.name.endswith(".yaml") else ():
            assert mistakes("published", row | {"spec": {"class": "dense", "stack": "any", **row["spec"]}}) == []


@examples(30)
@given(jobs())
def test_any_job_is_accepted(job: dict[str, Any]) -> None:
    job = json.loads(json.dumps(job | {"model": job["model"].model_dump()}))
    assert mistakes("job", job) == []
    assert mistakes("job", load_job(job).to_dict()) == []


@pytest.mark.parametrize(
    ("document", "fine"),
    [
        (
            {"job": "job.yaml", "vary": {"plan.tp": {"divisors": "gpus"}, "model": ["gpt2"]}, "where": ["gpus > 8"]},
            True,
        ),
        ({"job": {"cluster": "dgx-h100:1"}, "zip": [{"model": ["gpt2"], "plan.tp": [1]}], "list": [{"id": 1}]}, True),
        ({"job": {"cluster": "dgx-h100:1"}, "vary": {"batch.micro": {"range": [1, 9, 2]}}}, True),
        ({"job": 3}, False),
        ({"job": {"modle": "gpt2"}, "vary": {"plan.tp": [1]}}, False),
        ({"job": "job.yaml", "vary": {"plan.tp": {"power": [1, 2]}}}, False),
        ({"vary": {"plan.tp": [1]}}, False),
    ],
)
def test_a_sweep(document: Any, fine: bool) -> None:
    assert (mistakes("sweep", document) == []) is fine


FINE: dict[str, list[Any]] = {
    "cluster": [
        *("dgx-h100:4", "selene", {"node": "dgx-h100", "nodes": 2}),
        {"gpu": "h100-sxm", "gpus": 16, "gpus_per_node": None, "inter": {"kind": "roce", "gbps_per_gpu": 400}},
        {"groups": [{"node": "dgx-h100", "nodes": 2}, {"node": "dgx-a100", "nodes": 2}]},
        {"node": "dgx-h100", "nodes": 4, "fabric": {"levels": [{"nodes": 2}, {"oversubscription": 2}]}},
    ],
    "model": [
        *("llama3-8b", {"preset": "llama3-8b", "layers": 4, "window": None}),
        {"preset": "mixtral-8x7b", "moe": {"capacity": 1.0}},
        {"layers": 4, "hidden": 64, "heads": 4, "vocab": 100, "seq": 32, "kv_heads": None, "ssm": None},
        {"layers": 4, "hidden": 64, "heads": 4, "vocab": 100, "seq": 32, "variants": [{"numbers": [1], "ffn": 96}]},
        {"layers": 4, "hidden": 64, "heads": 4, "seq": 32, "diffusion": {"inputs": 16}, "modulation": {"by": "table"}},
    ],
    "framework": ["megatron-core", {"name": "torchtitan"}, {"set": {"overlap": {"dp": False}, "launch_s": 0}}],
}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, some in FINE.items() for value in some])
def test_every_form_is_accepted(kind: str, value: Any) -> None:
    job: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100:1", kind: value}
    load_job(job)
    assert mistakes(kind, value) == [] and mistakes("job", job) == []


WRONG: dict[str, list[Any]] = {
    "cluster": [3, {"node": "dgx-h100"}, {"node": "dgx-h100", "nodes": "2"}, {"gpu": "h100-sxm", "gpus": 0}, {}],
    "model": [
        None,
        {"layers": 4},
        {"preset": "gpt2", "layer": 4},
        {"preset": "gpt2", "layers": 0.5},
        "",
        {"layers": 4, "hidden": 64, "heads": 4, "seq": 32},
    ],
    "framework": ["megatron", {"nam": "torchtitan"}, {"set": {"overlap": {"dp": 2}}}, None],
    "plan": [{"tp": "4"}, {"mesh": {"tp": 0}}, {"mesh": {}, "schemes": [{"use": "data/zero"}]}, {"zero": 4}],
    "precision": [None, "bf17", {"compute": "bf16", "gradient": "fp32"}],
    "batch": [{"micro": 0}, {"sequence": 1.5}, 4],
}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, some in WRONG.items() for value in some])
def test_invalid_values_are_refused_by_schema_and_loader(kind: str, value: Any) -> None:
    job = {"model": "gpt2", "cluster": "dgx-h100:1", kind: value}
    with pytest.raises(MeshcastError):
        resolve_plan(load_job(job))
    assert mistakes("job", job) and (kind not in KINDS or mistakes(kind, value))


def test_it_describes_clusters_in_full() -> None:
    """Parts of a cluster that are written out where a name of the catalog may stand."""
    cluster = {"node": {"gpu": "h100-sxm", "gpus": {"value": 8, "kind": "peak", "source": "a"}}, "nodes": 1, "gpus": 1}
    load_cluster(cluster)
    assert mistakes("cluster", cluster) == []
    cluster["node"] = {"gpu": "h100-sxm", "gpus": 8}
    assert mistakes("cluster", cluster)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_options_of_every_command_have_a_schema(command: str) -> None:
    options = find_options(command)
    described = options_schema(f"{command}-options", options)
    Draft202012Validator.check_schema(described)
    fields = {name: field["description"] for name, field in described["properties"].items()}
    assert fields == {name: flag.help for name, flag in options.flags().items()}
