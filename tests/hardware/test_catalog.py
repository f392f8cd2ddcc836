"""The files of the catalog, and the values in them."""

import copy
import pickle
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from meshcast import hardware
from meshcast.hardware import GPU, CatalogError, Cluster, Link, Node, Value, catalog, load, load_cluster
from meshcast.hardware.load import Bandwidth, LinkRate, Strict, quantity, read_yaml, validate_data
from meshcast.hardware.reliability import CheckpointStore, Reliability
from meshcast.hardware.sourced_values import sourced_values
from meshcast.validation.contract.of_plugins import gpu_problems, node_problems

ENTRIES = [
    (kind, name) for kind in ("gpus", "links", "nodes", "clusters", "reliability", "stores") for name in catalog(kind)
]


def operators(data: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every catalog value (a mapping with `value`) and every bare number or truth value of a document."""
    if isinstance(data, dict) and "value" not in data:
        return [operator for key, item in data.items() for operator in operators(item, f"{path}.{key}")]
    return [(path, data)] if isinstance(data, (dict, list, int, float)) else []


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_loads(kind: str, name: str) -> None:
    entry = load(kind, name)
    models = {"gpus": GPU, "links": Link, "nodes": Node, "clusters": Cluster}
    models |= {"reliability": Reliability, "stores": CheckpointStore}
    assert isinstance(entry, models[kind])
    assert entry.name == name and entry.title
    assert load(kind, name) is entry, "read once"
    assert hash(entry) == hash(entry.model_copy()) and entry == entry.model_copy()


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_value_has_a_source_and_a_kind(kind: str, name: str) -> None:
    document = read_yaml(resources.files("meshcast.hardware") / "catalog" / kind / f"{name}.yaml")
    assert "/work" not in document.text and "shared" not in document.text
    if kind == "clusters":  # sizes are a user's plain numbers; the file as a whole names its source
        assert document.data["source"]
        return
    for path, value in operators(document.data):
        assert isinstance(value, dict), f"{path} is a bare number"
        assert len(value["source"]) > 5 and value["kind"] in ("peak", "measured", "fitted", "assumed"), path
        assert value["kind"] == "assumed" or value["checked"], f"{path} was read nowhere on no day"


def test_values_are_listed_by_the_paths_of_their_fields() -> None:
    """Of the file alone: a GPU and links that it names have files of their own."""
    gpu, node = load("gpus", "h100-sxm"), load("nodes", "dgx-1v")
    values, of_node = dict(sourced_values(gpu)), dict(sourced_values(node))
    assert values["memory"] is gpu.memory and values["peak.bf16"] is gpu.peak["bf16"]
    assert of_node["nics.count"] is node.nics.count and of_node["scale_up.mesh"] is node.scale_up.mesh
    assert not any(path.startswith(("gpu.", "nics.link", "scale_up.link", "host.link")) for path in of_node)


ACCELERATORS = [name for name in hardware.gpus() if load("gpus", name).architecture != "cpu"]
"""A core that stands in for a GPU has no matrix units."""


@pytest.mark.parametrize("name", ACCELERATORS)
def test_gpus_are_consistent(name: str) -> None:
    assert [*gpu_problems(name)] == []
    assert load("gpus", name).host.family in ("pcie", "nvlink")


@pytest.mark.parametrize(
    ("kind", "formats"), [("volta", {"bf16", "tf32", "fp8"}), ("ampere", {"fp8"}), ("hopper", {"fp4"})]
)
def test_formats_that_a_generation_lacks(kind: str, formats: set[str]) -> None:
    found = [gpu for name in hardware.gpus() if (gpu := load("gpus", name)).architecture == kind]
    assert found and not any(formats & set(gpu.peak) for gpu in found)
    assert all("fp4" in load("gpus", name).peak for name in hardware.gpus() if "b200" in name or "b300" in name)


@pytest.mark.parametrize("name", hardware.nodes())
def test_nodes_are_consistent(name: str) -> None:
    assert [*node_problems(name)] == []
    node: Node = load("nodes", name)
    up = node.scale_up
    if up is not None:
        used = up.among(tuple(range(node.domain)))
        assert used == pytest.approx(1.0) or 2 / 3 <= used < 1 < up.link.links, "all links, but on half of a board"
        assert up.between(0, 1) == 1.0 if up.switched.value or node.domain == 2 else up.between(0, 1) < 1.0


def test_pairs_in_a_cube_mesh() -> None:
    up = load("nodes", "dgx-1v").scale_up
    rows = up.mesh.value
    assert [sum(row) for row in rows] == [6] * 8 and up.gaps
    ring = up.mesh.model_copy(update={"value": ((0, 1, 1), (1, 0, 1), (1, 1, 0))})
    assert not up.model_copy(update={"mesh": ring}).gaps, "a GPU needs no link to itself"
    # Two planes of four GPUs joined at their corners.
    assert all(rows[i][j] == rows[i + 4][j + 4] for i in range(4) for j in range(4))
    assert [[j for j in range(4, 8) if rows[i][j]] for i in range(4)] == [[4], [5], [6], [7]]


def test_known_numbers() -> None:
    a100, h100 = load("gpus", "a100-sxm-80"), load("gpus", "h100-sxm")
    assert (a100.memory, h100.memory) == (80 * 2**30, 80 * 2**30)
    assert (a100.peak["bf16"], h100.peak["bf16"]) == (312e12, 989e12)
    assert "fp8" not in a100.peak and h100.peak["fp8"] == 1979e12
    assert load("links", "nvlink3").bandwidth == 300e9 and load("links", "nvlink4").bandwidth == 450e9
    assert load("links", "infiniband-hdr").bandwidth == 25e9 and load("links", "infiniband-ndr").bandwidth == 50e9


class Box(Strict):
    """A model with one quantity of each sort."""

    memory: Bandwidth | None = None
    link: LinkRate | None = None


def entry(**more: Any) -> dict[str, Any]:
    return {"value": "900 GB/s", "kind": "peak", "source": "a datasheet", **more}


def test_both_directions_are_halved() -> None:
    both = Box(link=entry(direction="both"))  # type: ignore[arg-type]
    one = Box(link=entry(direction="one"))  # type: ignore[arg-type]
    assert both.link == 450e9 and one.link == 900e9


def test_a_value_is_a_float_that_remembers() -> None:
    value = Box(memory=entry(page=3, note="n", checked="2026-11-21")).memory  # type: ignore[arg-type]
    assert isinstance(value, Value) and value / 9 == 100e9
    for one in (value, copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (float(one), one.text, one.kind, one.source) == (900e9, "900 GB/s", "peak", "a datasheet, page 3")
        assert (one.note, one.checked) == ("n", "2026-11-21")


def test_every_dimension_has_a_schema() -> None:
    class One(BaseModel):
        x: Bandwidth

    assert "source" in str(One.model_json_schema())
    assert quantity("time", zero=True).zero


def test_importing_hardware_is_light() -> None:
    heavy = "numpy pandas matplotlib scipy networkx torch meshcast.simulator meshcast.validation meshcast.experiments"
    code = f"import meshcast.hardware, sys; print([m for m in {heavy!r}.split() if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_failures_of_a_run_add_up_to_its_table() -> None:
    """Llama 3 405B: 419 unexpected interruptions in 54 days of 16,384 GPUs, one in 3.09 hours."""
    rates = load("reliability", "llama3-405b")
    assert sum(component.failures for component in rates.components.values()) == 419
    units = {"gpu": 16_384, "nic": 16_384, "node": 2048}
    rate = sum(units[one.per] / rates.mtbf(name) for name, one in rates.components.items())
    assert 1 / rate == pytest.approx(54 * 86_400 / 419)


def test_a_store_grows_with_the_nodes_that_its_rates_are_of() -> None:
    source = {"kind": "assumed", "source": "a test"}
    store = validate_data(CheckpointStore, {"name": "a", "write": {"value": "10 GB/s", **source}}, "store")
    assert store.rates(4) == store.rates(400) == (10e9, 10e9)
    shared = store.model_copy(update={"nodes": Value(100.0), "read": Value(20e9)})
    assert shared.rates(50) == (5e9, 10e9)


def test_a_rate_is_stated_once() -> None:
    count = {"value": 3, "kind": "assumed", "source": "a test"}
    time = {"value": "1 d", "kind": "assumed", "source": "a test"}
    with pytest.raises(CatalogError, match="both counts, or `mtbf`"):
        entry = {"per": "gpu", "failures": count, "mtbf": time}
        times = {"detection": time, "scheduling": time, "warm_up": time, "repair": time}
        validate_data(Reliability, {"name": "a", "components": {"gpu": entry}, **times}, "reliability")


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    """A node in a file whose GPU is in a file: in a notebook both may change between two forecasts."""
    gpu, node = tmp_path / "gpu.yaml", tmp_path / "node.yaml"
    folder = resources.files("meshcast.hardware") / "catalog"
    text = (folder / "gpus" / "h100-sxm.yaml").read_text("utf-8")
    usual = (folder / "nodes" / "dgx-h100.yaml").read_text("utf-8")
    node.write_text(usual.replace("gpu: h100-sxm", f"gpu: {gpu}"), "utf-8")
    for written in ("80 GiB", "40 GiB", "20 GiB"):
        gpu.write_text(text.replace("80 GiB", written), "utf-8")
        found = [load_cluster({"node": str(node), "nodes": 2}), load_cluster({"gpu": str(gpu), "gpus": 8})]
        assert [one.gpu.memory for one in found] == [int(written[:2]) * 2**30] * 2
        assert load("nodes", str(node)) is load("nodes", str(node))
