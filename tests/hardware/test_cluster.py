"""Every way of naming a cluster, and every way of getting it wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from hardware import CatalogError, Cluster, Value, clusters, load, load_cluster
from hardware.load import MAX_BYTES, line_of

INLINE = {
    "gpu": "h100-sxm",
    "gpus": 128,
    "gpus_per_node": 8,
    "scale_up_domain": 8,
    "inter": {"kind": "infiniband", "gbps_per_gpu": 400},
}


def test_one_word() -> None:
    cluster = load_cluster("dgx-h100:64")
    assert (cluster.gpus, cluster.nodes, cluster.gpus_per_node, cluster.scale_up_domain) == (512, 64, 8, 8)
    assert cluster.gpu.name == "h100-sxm" and not cluster.assumed
    assert (cluster.scale_up.kind, cluster.scale_up.bandwidth) == ("nvlink4", 450e9)
    assert (cluster.scale_out.kind, cluster.scale_out.bandwidth) == ("infiniband-ndr", 50e9)
    assert load_cluster("dgx-a100:2").scale_out.bandwidth == 25e9
    assert load_cluster(cluster) is cluster


def test_mapping_by_node_equals_one_word() -> None:
    cluster = load_cluster({"node": "dgx-h100", "nodes": 64, "name": "dgx-h100:64"})
    assert cluster == load_cluster("dgx-h100:64")


def test_mapping_by_gpu() -> None:
    cluster = load_cluster(INLINE)
    assert (cluster.nodes, cluster.gpus) == (16, 128)
    assert cluster.scale_out == load_cluster("dgx-h100:16").scale_out
    assert cluster.scale_up == load_cluster("dgx-h100:16").scale_up


@pytest.mark.parametrize("kind", ["infiniband", "roce", "efa", "omnipath", "ethernet", "slingshot"])
def test_any_network_at_any_rate(kind: str) -> None:
    cluster = load_cluster({**INLINE, "inter": {"kind": kind, "gbps_per_gpu": 50}})
    assert cluster.scale_out.kind == kind and cluster.scale_out.bandwidth == 50e9 / 8
    assert cluster.scale_out.latency > 0 and 0 < cluster.scale_out.payload <= 1


def test_what_is_not_told_is_assumed_and_said() -> None:
    cluster = load_cluster({"gpu": "a100-sxm-80", "gpus": 64})
    assert cluster.scale_out.kind == "infiniband-hdr" and cluster.gpus_per_node == 8
    assert [one.partition(":")[0] for one in cluster.assumed] == [
        *["cluster.gpus_per_node", "cluster.inter.kind", "cluster.inter.gbps_per_gpu"]
    ]
    rate = load_cluster({**INLINE, "inter": {"kind": "infiniband", "gbps_per_gpu": None}})
    assert rate.scale_out.kind == "infiniband-ndr" and len(rate.assumed) == 1


def test_part_of_a_node_keeps_the_nodes_network_share() -> None:
    cluster = load_cluster({**INLINE, "gpus": 4})
    assert (cluster.nodes, cluster.gpus, cluster.scale_up_domain, cluster.gpus_per_node) == (1, 4, 4, 8)
    assert cluster.scale_out.bandwidth == 50e9
    assert load_cluster({"node": "dgx-h100", "nodes": 2, "gpus": 12}).gpus == 12


def test_without_a_network() -> None:
    cluster = load_cluster({**INLINE, "gpus": 8, "inter": {"kind": "none"}})
    assert (cluster.scale_out.kind, cluster.scale_out.bandwidth) == ("none", 0.0)


def test_catalog_and_file(tmp_path: Path) -> None:
    assert load_cluster("selene").gpus == 4480 and "selene" in clusters()
    (tmp_path / "mine.yaml").write_text("node: dgx-a100\nnodes: 4\nfabric: {oversubscription: 2}\n")
    (tmp_path / "paper.json").write_text(json.dumps(INLINE))
    mine = load_cluster("mine.yaml", base=tmp_path)
    assert mine.gpus == 32 and mine.scale_out.oversubscription == 2 and mine.scale_out.bandwidth == 25e9
    assert load_cluster(tmp_path / "mine.yaml") == mine
    assert load_cluster("paper.json", base=tmp_path) == load_cluster(INLINE)


def test_reports() -> None:
    cluster = load_cluster("dgx-h100:2")
    assert str(cluster) == "16 x h100-sxm in 2 nodes (nvlink4, infiniband-ndr)"


def test_copies_follow_their_fields() -> None:
    assert load_cluster("dgx-h100:2").model_copy(update={"nodes": 4}).gpus == 32


BAD: list[tuple[Any, str, str, str]] = [
    # spec, where, rule, remedy
    ("dgx-h1000:64", "cluster", "no node 'dgx-h1000'", "Did you mean 'dgx-h100'?"),
    ("dgx-h100:0", "cluster", "whole number above 0", "dgx-h100:64"),
    ("dgx-h100:-4", "cluster", "whole number above 0", "dgx-h100:64"),
    ("dgx-h100:4.5", "cluster", "whole number above 0", "dgx-h100:64"),
    ("dgx-h100:", "cluster", "whole number above 0", "dgx-h100:64"),
    ("dgx-h100", "cluster", "whole number above 0", "dgx-h100:64"),
    ("dgx-h100:٤", "cluster", "whole number above 0", "dgx-h100:64"),
    ("dgx-h100:1" + "0" * 5000, "cluster", "more than 1,000,000 GPUs", "fewer nodes"),
    ("dgx-h100:999999", "cluster", "more than 1,000,000 GPUs", "fewer nodes"),
    ("selen", "cluster", "no such cluster", "Did you mean 'selene'?"),
    ("", "cluster", "no such cluster", "selene"),
    (64, "cluster", "a name, a path or a mapping", "dgx-h100:64"),
    (None, "cluster", "a name, a path or a mapping", "dgx-h100:64"),
    (["dgx-h100"], "cluster", "a name, a path or a mapping", "dgx-h100:64"),
    ({}, "cluster.node", "needed and missing", "Add `node: ...`"),
    ({"noed": "dgx-h100", "nodes": 2}, "cluster.noed", "no such key", "Did you mean 'node'?"),
    ({"node": "dgx-b100", "nodes": 2}, "cluster.node", "not in the catalog of nodes", "Did you mean 'dgx-"),
    ({"node": "dgx-h100", "nodes": "2"}, "cluster.nodes", "whole number", "without quotes"),
    ({"node": "dgx-h100", "nodes": True}, "cluster.nodes", "whole number", "without quotes"),
    ({"node": "dgx-h100", "nodes": 10**400}, "cluster.nodes", "at most 1000000", "or less"),
    ({"node": "dgx-h100", "nodes": 900_000}, "cluster", "more than 1,000,000", "fewer nodes"),
    ({"node": "dgx-h100", "nodes": 2, "gpus": 8}, "cluster", "8 GPUs do not fill 2 nodes", "9 to 16 GPUs"),
    ({"node": "dgx-h100", "nodes": 2, "fabric": {"oversubscription": 0.5}}, "fabric.oversub", "at least 1", "or more"),
    ({"node": {"gpu": "h100-sxm"}, "nodes": 1}, "cluster.node.gpus", "needed and missing", "Add"),
    ({1: 2, "node": "dgx-h100", "nodes": 1}, "cluster", "keys must be text", "quotes"),
    ({**INLINE, "nodes": 16}, "cluster.nodes", "by its node or by its GPU", "Keep"),
    ({**INLINE, "gpu": "h100_sxm"}, "cluster.gpu", "not in the catalog of gpus", "Did you mean 'h100-sxm'?"),
    ({**INLINE, "gpus": 0}, "cluster.gpus", "above 0", "above 0"),
    ({**INLINE, "scale_up_domain": 3}, "cluster", "do not nest", "multiple"),
    ({**INLINE, "inter": {"kind": "infinband"}}, "cluster.inter.kind", "valid words", "Did you mean 'infiniband'?"),
    ({**INLINE, "inter": {"kind": "none"}}, "cluster", "no network between them", "Give the nodes a network"),
    ({**INLINE, "inter": {"kind": "none", "gbps_per_gpu": 4}}, "cluster.inter", "kind is none", "Name the network"),
    ({**INLINE, "inter": {"kind": "roce", "gbps_per_gpu": -1}}, "cluster.inter.gbps_per_gpu", "above 0", "above 0"),
    ({**INLINE, "inter": {"kind": "roce", "gbps": 1}}, "cluster.inter.gbps", "no such key", "'gbps_per_gpu'"),
    ({**INLINE, "inter": "infiniband"}, "cluster.inter", "must be a mapping", "Keys: kind, gbps_per_gpu"),
    ({**INLINE, "inter": {"kind": "roce", "gbps_per_gpu": float("nan")}}, "gbps_per_gpu", "finite", "number"),
]


@pytest.mark.parametrize(("spec", "where", "rule", "remedy"), BAD, ids=lambda one: repr(one)[:40])
def test_a_malformed_cluster_gives_one_clear_message(spec: Any, where: str, rule: str, remedy: str) -> None:
    with pytest.raises(CatalogError) as e:
        load_cluster(spec)
    assert where in e.value.where and rule in e.value.rule and remedy in e.value.remedy
    assert len(str(e.value)) < 500 and "\n" not in str(e.value) and "pydantic" not in str(e.value)


BAD_FILES: list[tuple[bytes, str, str]] = [
    (b"node: dgx-a100\nnodes: 2\nnodes: 3\n", "c.yaml:3", "'nodes' is given twice"),
    (b"node: dgx-a100\n\nnodes: two\n", "c.yaml:3 nodes", "whole number"),
    (b"node: dgx-a100\nnodes: 2\nfabric:\n  oversub: 2\n", "c.yaml:4 fabric.oversub", "no such key"),
    (b"gpu: h100-sxm\ngpus: 8\nnode: x\n", "c.yaml:3 node", "by its node or by its GPU"),
    (b"node: [\n", "c.yaml:2", "not valid YAML"),
    (b"a: 1\n---\nb: 2\n", "c.yaml:2", "not valid YAML"),
    (b"a: !!python/object:os.system x\n", "c.yaml:1", "not valid YAML"),
    (b"\x00\x01\x02", "c.yaml", "not valid YAML"),
    (b"\xff\xfe\xfa", "c.yaml", "not UTF-8"),
    (b"", "c.yaml", "must be a mapping"),
    (b"just words\n", "c.yaml", "must be a mapping"),
    (b"[" * 5000, "c.yaml", "nested too deeply"),
    (b"a: &x [*x]\n", "c.yaml", "aliases"),
    (b"date: 2026-13-45\n", "c.yaml", "not valid YAML"),
    (b"a: 1" + b"0" * 5000 + b"\n", "c.yaml", "not valid YAML"),
    (b" " * (MAX_BYTES + 1), "c.yaml", "at most 10,000,000"),
]


@pytest.mark.parametrize(("content", "where", "rule"), BAD_FILES, ids=lambda one: repr(one)[:30])
def test_a_malformed_file_gives_one_clear_message(tmp_path: Path, content: bytes, where: str, rule: str) -> None:
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(CatalogError) as e:
        load_cluster("c.yaml", base=tmp_path)
    assert e.value.where.startswith(where) and rule in e.value.rule
    assert len(str(e.value)) < 400 and "\n" not in str(e.value)


def test_an_alias_bomb_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    with pytest.raises(CatalogError, match="aliases"):
        load_cluster("c.yaml", base=tmp_path)


def test_a_path_that_is_no_file(tmp_path: Path) -> None:
    for path, rule in [("no.yaml", "no such file"), (f"{tmp_path}/", "not a regular file"), ("/dev/zero", "regular")]:
        with pytest.raises(CatalogError, match=rule):
            load_cluster(path, base=tmp_path)
    for path in ("a\0.yaml", "a" * 5000 + ".yaml"):
        with pytest.raises(CatalogError):
            load_cluster(path, base=tmp_path)


def test_the_error_names_the_callers_place() -> None:
    with pytest.raises(CatalogError) as e:
        load_cluster({"node": "dgx-h100"}, where="job.cluster")
    assert e.value.where == "job.cluster.nodes"
    assert str(e.value.at("job.yaml:2")) == "job.yaml:2 job.cluster.nodes: needed and missing. Add `nodes: ...`"


def test_line_of() -> None:
    text = "a:\n  b: 1\n  c:\n    - x\n    - y\n"
    places: dict[tuple[int | str, ...], int] = {("a",): 1, ("a", "b"): 2, ("a", "c", 1): 5, ("a", "z"): 1, ("q",): 1}
    assert {place: line_of(text, place) for place in places} == places
    assert line_of("a: [", ("a",)) == 1


def test_load_unknown_name() -> None:
    with pytest.raises(CatalogError, match="Did you mean 'h100-sxm'"):
        load("gpus", "h100-sxm5")
    with pytest.raises(CatalogError):
        load("gpus", "../links/nvlink4")


def test_a_node_told_in_full() -> None:
    told = {"value": 4, "kind": "peak", "source": "a test"}
    node = {"gpu": "h100-sxm", "gpus": told, "scale_up": {"link": "nvlink4"}}
    cluster = load_cluster({"node": node, "nodes": 1})
    assert isinstance(cluster, Cluster) and isinstance(cluster.node.gpus, Value) and cluster.gpus == 4
