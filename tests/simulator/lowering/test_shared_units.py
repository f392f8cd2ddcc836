"""Equal descriptions are one object, and no change of one job reaches another through it."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware import load_cluster
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.shared import MAX_DESCRIPTIONS, frozen, shared_instance
from meshcast.simulator import load_job
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.models.load import load_model

INLINE: dict[str, Any] = {
    "model": {"layers": 8, "hidden": 64, "heads": 8, "vocab": 96, "seq": 48},
    "cluster": {"gpu": "h100-sxm", "gpus": 16, "inter": {"kind": "infiniband", "gbps_per_gpu": 400}},
    "framework": {"set": {"overlap": {"dp": False}, "rates": {"kernel": 0.9}}},
    "precision": "fp16",
    "plan": {"tp": 2},
}
NAMED: dict[str, Any] = {"model": "gpt3-175b", "cluster": "dgx-a100:128", "plan": {"tp": 8, "pp": 16}}


@pytest.mark.parametrize("job", [INLINE, NAMED])
def test_equal_jobs_share_what_they_describe(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcast.hardware.shared._made", {})  # that of other tests may be full, and is then emptied
    first, second = load_job(job), load_job(copy.deepcopy(job) | {"batch": {"micro": 2}})
    for part in ("model", "cluster", "framework"):
        assert getattr(first, part) is getattr(second, part)
        assert hash(getattr(first, part)) == hash(getattr(second, part).model_copy())
    assert first.plan is second.plan and first.batch != second.batch


def test_different_spellings_of_one_description_are_one_object() -> None:
    assert load_model({"preset": "gpt3", "name": "gpt3-175b", "layers": 96}) is load_model("gpt3-175b")
    assert load_cluster({"nodes": 2, "node": "dgx-h100", "name": "dgx-h100:2"}) is load_cluster("dgx-h100:02")
    assert load_framework("megatron-core", {"overlap": {"dp": True}}) is load_framework("megatron-core")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("model.layers=9", "model"),
        ("cluster.gpus=8", "cluster"),
        ("precision=bf16", "framework"),
        ("framework=megatron-core", "framework"),
    ],
)
def test_another_description_is_another_object(change: str, part: str) -> None:
    one, two = getattr(load_job(INLINE), part), getattr(load_job(INLINE, [change]), part)
    assert one is not two and one != two


def test_a_change_of_the_mapping_reaches_no_job() -> None:
    job = copy.deepcopy(INLINE)
    first = load_job(job)
    job["model"]["layers"] = 4
    job["framework"]["set"]["rates"]["kernel"] = 0.5
    assert load_job(job).model.layers == 4 and load_job(job).framework.rates["kernel"] == 0.5
    first.as_written["model"]["layers"] = 2
    assert load_job(INLINE).model is first.model and first.model.layers == 8
    assert load_job(INLINE).as_written["model"]["layers"] == 8


def test_a_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    job = {**NAMED, "cluster": str(file), "plan": {}}
    file.write_text("node: dgx-a100\nnodes: 2\n")
    two = load_job(job).cluster
    file.write_text("node: dgx-a100\nnodes: 3\n")
    assert (two.nodes, load_job(job).cluster.nodes) == (2, 3)
    file.write_text("nodes: 2 # as at first\nnode: dgx-a100\n")
    assert load_job(job).cluster is two


def test_a_mistake_is_reported_every_time() -> None:
    places = []
    for where in ("job.yaml:1 cluster", "job.yaml:2 cluster"):
        with pytest.raises(MeshcastError) as refused:
            load_cluster({"node": "dgx-a100"}, where)
        places.append(refused.value.where)
    assert places == ["job.yaml:1 cluster.nodes", "job.yaml:2 cluster.nodes"]


def test_descriptions_that_count_as_equal() -> None:
    assert frozen({"a": 1, "b": [True, None]}) == frozen({"b": [True, None], "a": 1})
    ones = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": [1]}, {"a": {}}, {}, {"a": datetime.date(1, 1, 1)}]
    assert len({frozen(one) for one in ones}) == len(ones)


def test_descriptions_of_other_types_are_built_anew() -> None:
    circle: dict[str, Any] = {}
    circle["a"] = circle
    for data in ({"a": object}, {"a": float.__new__(type("Rate", (float,), {}), 1)}, circle):
        assert shared_instance("test", data, list) is not shared_instance("test", data, list)


def test_the_number_of_kept_objects_is_bounded() -> None:
    from meshcast.hardware.shared import _made

    for n in range(MAX_DESCRIPTIONS + 10):
        shared_instance("test", n, list)
    assert len(_made) <= MAX_DESCRIPTIONS
