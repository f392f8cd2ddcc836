"""Clusters in the words of people: counts of GPUs and machines of clouds; what is open is asked."""

from __future__ import annotations

import pytest

from meshcast.hardware import catalog, gpus, load, load_cluster
from meshcast.hardware.cluster_words import find_gpus
from meshcast.hardware.machines import Cloud

CLOUDS: list[Cloud] = [load("machines", name) for name in catalog("machines")]
MACHINES = {name: machine for cloud in CLOUDS for group in cloud.groups for name, machine in group.machines.items()}

READ = {
    "16xH100": ("dgx-h100", 16, 8), "64 h100": ("dgx-h100", 64, 8), "H100x64": ("dgx-h100", 64, 8),
    "8x8xH100": ("dgx-h100", 64, 8), "2 x 8 x H100 SXM5": ("dgx-h100", 16, 8),
    "8x NVIDIA H100 80GB HBM3": ("dgx-h100", 8, 8), "8x H100 PCIe": ("pcie-8xh100", 8, 8),
    "8xA100-80G": ("dgx-a100", 8, 8), "8xA100-SXM4-40GB": ("dgx-a100-40", 8, 8),
    "2x4xA100-40": ("4 x a100-sxm-40", 8, 4), "4xH100": ("8 x h100-sxm", 4, 8), "8xRTX4090": ("rtx-4090-8", 8, 8),
    "72xGB200": ("gb200-nvl72", 72, 4), "dgx-h100 x 2": ("dgx-h100", 16, 8), "p5.48xlarge:2": ("p5", 16, 8),
    "2 x Standard_ND96asr_v4": ("nd-a100-v4", 16, 8), "g5.12xlarge:2": ("4 x a10g", 8, 4),
}  # fmt: skip


@pytest.mark.parametrize("word", READ)
def test_words_are_read_and_what_they_were_taken_for_is_listed(word: str) -> None:
    cluster = load_cluster(word)
    assert (cluster.node.name, cluster.gpus, cluster.gpus_per_node) == READ[word]
    assert cluster.assumed[0].startswith(f"cluster: {word!r} is read as {cluster.name}")
    assert load_cluster(word) is cluster


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_of_a_cloud_is_a_cluster(name: str) -> None:
    machine = MACHINES[name]
    node = load_cluster(f"{name}:2").node
    assert load_cluster(f"2 x {name.upper()}").gpus == 2 * int(node.gpus)
    if machine.node is not None:
        assert node.name == machine.node
    else:
        assert (node.gpu.name, int(node.gpus)) == (machine.gpu, machine.gpus)
    if machine.gbps and node.nics:
        assert float(node.nics.link.bandwidth * node.nics.count) * 8 / 1e9 == pytest.approx(machine.gbps)


def test_names_of_machines_are_of_one_cloud() -> None:
    names = [name.lower() for cloud in CLOUDS for group in cloud.groups for name in group.machines]
    assert len(names) == len(set(names))
    assert all(group.checked or group.kind == "assumed" for cloud in CLOUDS for group in cloud.groups)


@pytest.mark.parametrize("name", [name for name in gpus() if name != "cpu-core"])
def test_a_gpu_is_found_by_its_own_name_and_by_its_title(name: str) -> None:
    assert find_gpus(name) == (name,)
    assert name in find_gpus(load("gpus", name).title.partition(",")[0])
