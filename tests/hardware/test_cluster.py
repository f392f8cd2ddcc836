"""Every way of naming a cluster, and every way of getting it wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware import CatalogError, Cluster, Value, catalog, clusters, load, load_cluster, reach
from meshcast.hardware.cluster import STAGING
from meshcast.hardware.load import line_of

INLINE = {
    "gpu": "h100-sxm", "gpus": 128, "gpus_per_node": 8, "scale_up_domain": 8,
    "inter": {"kind": "infiniband", "gbps_per_gpu": 400},
}  # fmt: skip


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
    assert cluster.scale_out.kind in (kind, f"{kind}-50") and cluster.scale_out.bandwidth == 50e9 / 8
    assert cluster.scale_out.latency > 0 and 0 < cluster.scale_out.payload <= 1


def test_missing_fields_are_assumed_and_listed() -> None:
    cluster = load_cluster({"gpu": "a100-sxm-80", "gpus": 64})
    assert cluster.scale_out.kind == "infiniband-hdr" and cluster.gpus_per_node == 8
    assert [one.partition(":")[0] for one in cluster.assumed] == [
        *["cluster.gpus_per_node", "cluster.scale_up_domain", "cluster.inter.kind", "cluster.inter.gbps_per_gpu"]
    ]
    rate = load_cluster({**INLINE, "inter": {"kind": "infiniband", "gbps_per_gpu": None}})
    assert rate.scale_out.kind == "infiniband-ndr" and len(rate.assumed) == 1


def test_ports_that_gpus_share() -> None:
    inter = {"kind": "infiniband", "gbps_per_gpu": 50, "ports": 2}
    cluster = load_cluster({**INLINE, "inter": inter})
    assert cluster.node.nics is not None and cluster.ports_shared
    assert (cluster.node.nics.count, cluster.node.nics.link.name) == (2, "infiniband-hdr")
    assert cluster.scale_out.bandwidth == load_cluster({**INLINE, "inter": {**inter, "ports": 8}}).scale_out.bandwidth
    usual = load_cluster({"gpu": "v100-sxm2-16", "gpus": 16})
    assert usual.ports_shared and usual.scale_out == load_cluster("dgx-1v:2").scale_out
    assert not load_cluster(INLINE).ports_shared and not load_cluster("p5:2").ports_shared
    with pytest.raises(CatalogError, match="kind is none and ports is given"):
        load_cluster({**INLINE, "gpus": 8, "inter": {"kind": "none", "ports": 2}})


def test_cards_without_peer_access() -> None:
    board = load_cluster("l20-8:2")
    assert board.staged and board.staging == 60e9
    assert load_cluster({"gpu": "l20", "gpus": 8}).staging == 60e9
    half = load_cluster({"gpu": "l20", "gpus": 4, "gpus_per_node": 4})
    assert half.staged and half.node.staging is None and half.staging == STAGING
    assert not load_cluster("l40s-4:2").staged and not load_cluster("pcie-8xh100:1").staged
    mixed = load_cluster({"groups": [{"node": "l20-8", "nodes": 1}, {"node": "pcie-8xa100", "nodes": 1}]})
    assert mixed.staged and mixed.staging == 60e9


def test_a_board_without_peer_access_makes_its_node_one() -> None:
    stated = {"kind": "assumed", "source": "a test"}
    figures: dict[str, Any] = {"memory": "24 GiB", "memory_bandwidth": "1 TB/s", "l2": "72 MiB", "power": "450 W"}
    board: dict[str, Any] = {"name": "card", "architecture": "ada", "host": "pcie4"}
    board |= {key: {"value": value, **stated} for key, value in {**figures, "multiprocessors": 128}.items()}
    board["peak"] = {"bf16": {"value": "165 TFLOP/s", **stated}}
    node = {"name": "desk", "gpus": {"value": 4, **stated}}
    without = {**board, "peer_access": {"value": False, **stated}}
    assert not load_cluster({"node": {**node, "gpu": board}, "nodes": 1}).staged
    assert load_cluster({"node": {**node, "gpu": without}, "nodes": 1}).staged
    joined = {**node, "gpu": without, "scale_up": {"link": "nvlink4"}}
    assert not load_cluster({"node": joined, "nodes": 1}).staged, "NVLink needs no PCIe"


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
    assert mine.gpus == 32 and mine.fabric.joins[0].oversubscription == 2 and mine.scale_out.bandwidth == 25e9
    assert load_cluster(tmp_path / "mine.yaml") == mine
    assert load_cluster("paper.json", base=tmp_path) == load_cluster(INLINE)


def test_reports() -> None:
    cluster = load_cluster("dgx-h100:2")
    assert str(cluster) == "16 x h100-sxm in 2 nodes (nvlink4, infiniband-ndr)"


@pytest.mark.parametrize(("spec", "text"), [
    ("h200-nvl-8:1", "8 x h200-nvl in 1 node (nvlink4-bridge-4, pcie5, infiniband-ndr)"),
    ("l40s-4:2", "8 x l40s in 2 nodes (pcie4, roce)"),
    ("dgx-1v:1", "8 x v100-sxm2-16 in 1 node (nvlink2, pcie3, infiniband-edr)"),
    ("gb200-nvl72:18", "72 x gb200 in 18 nodes (nvlink5, infiniband-ndr)"),
])  # fmt: skip
def test_all_ways_between_gpus_are_named(spec: str, text: str) -> None:
    assert str(load_cluster(spec)) == text


def test_a_gpu_has_its_share_of_the_ports_of_its_node() -> None:
    rates = {"p5": 50e9, "p4d": 6.25e9, "dgx-2": 6.25e9, "oci-h100": 50e9, "jean-zay-a100": 6.25e9, "gb300-nvl72": 1e11}
    assert {name: load_cluster(f"{name}:2").scale_out.bandwidth for name in rates} == rates


@pytest.mark.parametrize(("gpu", "domain", "per_node", "kind", "gbps"), [
    ("gb200", 72, 4, "infiniband", 400), ("h200-nvl", 4, 8, "infiniband", 200), ("l40s", 1, 4, "roce", 200),
    ("a100-pcie-80", 1, 8, "infiniband", 100), ("mi355x", 8, 8, "roce", 400),
    ("v100-sxm2-32", 16, 16, "infiniband", 50),
])  # fmt: skip
def test_the_usual_node_fills_in(gpu: str, domain: int, per_node: int, kind: str, gbps: float) -> None:
    cluster = load_cluster({"gpu": gpu, "gpus": 144})
    assert (cluster.node.domain, cluster.gpus_per_node) == (domain, per_node)
    assert f"cluster.scale_up_domain: {domain}" in " ".join(cluster.assumed)
    assert f"cluster.inter.kind: {kind}" in " ".join(cluster.assumed)
    assert cluster.scale_out.bandwidth * 8 / 1e9 == gbps


@pytest.mark.parametrize(
    ("gpus", "used"), [(256, 64), (2496, 64), (144, 72), (72, 72), (32, 72), (288, 72), (292, 72), (512, 64), (100, 72)]
)
def test_racks_are_filled_evenly(gpus: int, used: int) -> None:
    """Groups of ranks stay in one rack where its GPUs are dealt out evenly; where that wastes half, it is full."""
    cluster = load_cluster({"gpu": "gb300", "gpus": gpus, "gpus_per_node": 4, "scale_up_domain": 72})
    assert cluster.domain == used
    assert any("of each scale-up domain of 72" in line for line in cluster.filled_in) == (used != 72)
    if used == 64:
        assert reach(cluster, range(64)).domains.number == 1 and reach(cluster, range(64, 128)).domains.number == 1
        assert reach(cluster, range(60, 70)).domains.number == 2


def test_levels_count_the_gpus_in_use() -> None:
    """Blocks of 36 trays, two racks, hold 128 of the GPUs in use where 64 of each rack are."""
    fabric = {"levels": [{"nodes": 36}, {"oversubscription": 4.0}]}
    cluster = load_cluster({"gpu": "gb200", "gpus": 512, "gpus_per_node": 4, "scale_up_domain": 72, "fabric": fabric})
    assert len(reach(cluster, range(128)).levels) == 1
    assert len(reach(cluster, range(192)).levels) == 2


def test_links_without_a_switch_are_those_of_the_usual_node() -> None:
    mesh = load_cluster({"gpu": "mi300x", "gpus": 4, "gpus_per_node": 4, "scale_up_domain": 4}).node.scale_up
    assert mesh and not mesh.switched.value and mesh.among((0, 1, 2, 3)) == pytest.approx(3 / 7)
    pair = load_cluster({"gpu": "a100-pcie-80", "gpus": 8, "gpus_per_node": 8, "scale_up_domain": 2}).node.scale_up
    assert pair and not pair.switched.value and pair.between(0, 1) == 1
    four = load_cluster({"gpu": "h200-nvl", "gpus": 8, "gpus_per_node": 8, "scale_up_domain": 4}).node.scale_up
    assert four and four.between(0, 1) == pytest.approx(1 / 3) and four.among((0, 1, 2, 3)) == 1
    none = load_cluster({"gpu": "h100-sxm", "gpus": 4, "gpus_per_node": 4, "scale_up_domain": 1})
    assert none.node.scale_up is None and none.scale_up.kind == "none" and none.host.kind == "pcie5"


def test_links_that_no_switch_joins_are_spread_evenly_over_a_larger_domain() -> None:
    by_gpu = {"gpu": "h200-nvl", "gpus": 8, "gpus_per_node": 8, "scale_up_domain": 8}
    up = load_cluster(by_gpu).node.scale_up
    assert up and not up.switched.value and up.between(0, 7) == int(up.link.links) // 7 / up.link.links
    with pytest.raises(CatalogError, match=rf"{int(up.link.links)} links do not join 64 GPUs without a switch"):
        load_cluster({**by_gpu, "gpus": 64, "gpus_per_node": 64, "scale_up_domain": 64})


MIXED = """groups:
- {node: dgx-h100, nodes: 4}
- {node: dgx-a100, nodes: 8}
fabric: {oversubscription: 2}
"""


def test_a_cluster_of_several_kinds(tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text(MIXED)
    cluster = load_cluster("mixed.yaml", base=tmp_path)
    assert [(group.node.name, group.nodes) for group in cluster.groups] == [("dgx-h100", 4), ("dgx-a100", 8)]
    assert (cluster.gpus, cluster.nodes, cluster.scale_up_domain) == (96, 12, 8)
    assert str(cluster) == "32 x h100-sxm + 64 x a100-sxm-80 in 12 nodes (nvlink3, infiniband-hdr)"
    a100, h100, gpu = load("gpus", "a100-sxm-80"), load("gpus", "h100-sxm"), cluster.gpu
    for key in ("memory", "memory_bandwidth", "l2", "multiprocessors"):
        assert getattr(gpu, key) == min(getattr(a100, key), getattr(h100, key))
    assert gpu is a100, "slower in everything, and so known to calibrations"
    assert cluster.scale_out.bandwidth == 25e9 and cluster.fabric.oversubscription == 2
    assert len(cluster.assumed) == 1 and "as slow as the slowest of dgx-h100 and dgx-a100" in cluster.assumed[0]


def test_nodes_of_other_sizes_and_links_are_mixed_as_well() -> None:
    cluster = load_cluster({"groups": [{"node": "gb200-nvl72", "nodes": 18}, {"node": "p5", "nodes": 2}]})
    assert (cluster.gpus, cluster.gpus_per_node, cluster.nodes, cluster.node.domain) == (88, 4, 22, 8)
    assert cluster.scale_up.bandwidth == 450e9 and cluster.scale_out.bandwidth == 50e9
    mesh = load_cluster({"groups": [{"node": "mi300x-8", "nodes": 1}, {"node": "dgx-a100", "nodes": 1}]})
    assert mesh.scale_up.bandwidth == pytest.approx(300e9) and not mesh.scale_up.switched
    plain = load_cluster({"groups": [{"node": "l40s-4", "nodes": 2}, {"node": "dgx-h100", "nodes": 1}]})
    assert plain.node.domain == 1 and plain.gpus == 16 and plain.host.kind == "pcie4"


def test_of_two_gpus_the_slower_in_each_figure() -> None:
    gpu = load_cluster({"groups": [{"node": "dgx-h100", "nodes": 1}, {"node": "hgx-h20", "nodes": 1}]}).gpu
    h100, h20 = load("gpus", "h100-sxm"), load("gpus", "h20")
    assert (gpu.name, gpu.memory, gpu.memory_bandwidth) == ("h100-sxm+h20", h100.memory, h100.memory_bandwidth)
    assert gpu.peak == h20.peak and gpu.multiprocessors == 78 and gpu.program_memory == h100.program_memory < gpu.memory
    old = load_cluster({"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-2", "nodes": 1}]})
    assert set(old.gpu.peak) == {"fp32", "fp16"} and old.host.kind == "pcie3", "formats that all know"


def test_the_host_of_several_kinds_is_the_slowest_for_each_gpu_in_each_figure() -> None:
    hosts = [load("nodes", name).host for name in ("dgx-h100", "dgx-a100")]
    host = load_cluster({"groups": [{"node": name, "nodes": 1} for name in ("dgx-h100", "dgx-a100")]}).node.host
    figures = {key: [getattr(of, key) for of in hosts] for key in ("memory", "capacity", "read", "write")}
    known = {key: min(values) for key, values in figures.items() if all(values)}
    assert known and host and {key: getattr(host, key) for key in known} == known
    unknown = next(name for name in catalog("nodes") if load("nodes", name).host is None)
    assert load_cluster({"groups": [{"node": "dgx-h100", "nodes": 1}, {"node": unknown, "nodes": 1}]}).node.host is None


def test_kinds_of_nodes_keep_the_regions() -> None:
    """Blocks count nodes as the groups list them; kinds of nodes of another size have the same blocks of GPUs."""
    groups = [{"node": "a2-highgpu-4", "nodes": 3}, {"node": "dgx-a100", "nodes": 2}, {"node": "dgx-a100", "nodes": 1}]
    cluster = load_cluster({"groups": groups, "fabric": {"levels": [{"blocks": [5, 1]}, {"link": "wan"}]}})
    assert (cluster.gpus_per_node, cluster.gpus) == (4, 36)
    assert cluster.fabric.levels[0].blocks == (7, 2), "in nodes of four GPUs"
    assert [kind.node.name for kind in cluster.kinds.values()] == [*cluster.kinds] == ["a2-highgpu-4", "dgx-a100"]
    for one in (cluster, *cluster.kinds.values()):
        assert len(reach(one, range(28, 36)).levels) < 2 and reach(one, [0, 28]).levels[1].blocks == 2
    with pytest.raises(CatalogError, match=r"blocks of 7 nodes in groups of 6\. Correct one of the two"):
        load_cluster({"groups": groups, "fabric": {"levels": [{"blocks": [6, 1]}, {"link": "wan"}]}})


@pytest.mark.parametrize("name", clusters())
def test_clusters_of_the_catalog(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name and cluster.title and cluster.source and cluster.gpus > 1
    assert cluster == load("clusters", name) and reach(cluster, range(cluster.gpus)).nodes.number > 1


def test_one_kind_in_groups_is_that_kind() -> None:
    one = load_cluster({"groups": [{"node": "dgx-h100", "nodes": 1}, {"node": "dgx-h100", "nodes": 3}]})
    assert one.node == load("nodes", "dgx-h100") and one.nodes == 4 and not one.assumed


def test_copies_follow_their_fields() -> None:
    assert load_cluster("dgx-h100:2").model_copy(update={"nodes": 4}).gpus == 32


def test_a_copy_with_another_fabric_looks_up_reaches_of_its_own() -> None:
    """What was found for a cluster (`Cluster.layout`) is no part of its copies."""
    near = load_cluster("dgx-h100:2")
    assert not near.fabric.hop_latency and near.layout
    far = near.model_copy(update={"fabric": near.fabric.model_copy(update={"oversubscription": 4.0})})
    assert far.layout != near.layout == near.model_copy(update={"title": "same"}).layout


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


def test_a_node_given_in_full() -> None:
    count = {"value": 4, "kind": "peak", "source": "a test"}
    node = {"gpu": "h100-sxm", "gpus": count, "scale_up": {"link": "nvlink4"}}
    cluster = load_cluster({"node": node, "nodes": 1})
    assert isinstance(cluster, Cluster) and isinstance(cluster.node.gpus, Value) and cluster.gpus == 4


def test_links_may_reach_less_on_one_node_than_elsewhere() -> None:
    usual, slower = load_cluster("dgx-a100:4"), load_cluster("jean-zay-a100:4")
    assert usual.scale_up.rate == 1 and 0 < slower.scale_up.rate < 1
    assert slower.scale_up.bandwidth == usual.scale_up.bandwidth
    mixed = load_cluster({"groups": [{"node": "dgx-a100", "nodes": 2}, {"node": "jean-zay-a100", "nodes": 2}]})
    assert mixed.scale_up.rate == slower.scale_up.rate


def test_a_number_of_nodes_may_have_any_length() -> None:
    with pytest.raises(CatalogError, match="more than 1,000,000 GPUs"):
        load_cluster("dgx-h100:1" + "0" * 5000)
