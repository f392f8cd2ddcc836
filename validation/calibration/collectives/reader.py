"""Reads tables of collectives, whose bytes are counted as in nccl-tests.

Each row becomes a collective or a message on a small cluster: the GPU's usual node, with the links and ports per node
that `interconnect` states. Nothing else is guessed: rows between nodes whose network is not stated are refused.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from meshcast.hardware import CatalogError, Cluster, load, load_cluster, reach
from meshcast.hardware.load import BooleanFact, assumed_value
from meshcast.simulator.ir.ops import Collective, Transfer
from meshcast.validation.calibration.collectives.sample import CollectiveSample
from meshcast.validation.calibration.kernels.sample import GPUS
from meshcast.validation.calibration.tables.rows import find_name

COLUMNS = (frozenset({"gpu", "interconnect", "op", "gpus", "nodes", "bytes", "time_us", "source"}),)
OPTIONAL = frozenset({"algo"})

PAIRS = {"a100_pcie_pairwise": "a100-pcie-80", "h100_pairwise": "h100-pcie"}
"""GPUs that are joined by pairs, by the names of tables."""

OPERATIONS = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "broadcast": "ring",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "p2p": "p2p",
    "send_recv": "p2p",
}
"""Sections of a calibration by the names of operations."""

LIBRARIES = (
    (r"int8", "nccl-tests-int8"),
    (r"all_reduce_bench", "all-reduce-bench"),
    (r"torch profiler|^vidur", "torch-profiler"),
    (r"^vTrain", "nccl-tests-vtrain"),
    (r"^Azure", "nccl-tests-azure"),
    (r"RCCL|rccl", "rccl-tests"),
    (r"nccl[-_]?tests|NCCL|GTC|aws-samples|coreweave|oracle|oci-hpc", "nccl-tests"),
)
"""Programs that call and time collectives, by patterns of sources; the first match counts."""

STAGING = assumed_value(16e9, "ai-dynamo/aiconfigurator @095f58a, NCCL tables of four and eight L40S", "16 GB/s")
"""Rate at which the host of the L40S of the tables copies between them: four and eight reach 5 and 1 to 2 GB/s of 31.
Two of them, between which NCCL uses peer access on AMD's CPUs (`ncclTopoCheckP2p` in src/graph/paths.cc of NVIDIA/nccl
@5067397), reach 20."""

NETWORKS = (
    (r"EFA", "efa"),
    (r"RoCE", "roce"),
    (r"InfiniBand|\bIB\b|\bNDR\b|\bHDR\b|\bXDR\b|\bEDR\b", "infiniband"),
    (r"Slingshot", "slingshot"),
    (r"Omni-?Path", "omnipath"),
    (r"TCP|Ethernet", "ethernet"),
)

MIB = 2**20
ROW = ["gpu", "interconnect", "op", "gpus", "nodes", "source", "algo"]


def read(table: pd.DataFrame) -> tuple[list[CollectiveSample], dict[int, str]]:
    """Returns samples, and the reasons of rows that cannot be priced, by their numbers."""
    rows = table.reset_index(drop=True)
    if "algo" not in rows:
        rows["algo"] = ""
    numbers = {name: pd.to_numeric(rows[name], errors="coerce") for name in ("gpus", "nodes", "bytes", "time_us")}
    rows = rows.assign(**numbers, **{name: rows[name].fillna("").astype(str) for name in ROW if name not in numbers})
    refused: dict[int, str] = {}
    for name, least, word in (("gpus", 2, "2"), ("nodes", 1, "1"), ("bytes", 1, "1"), ("time_us", 1e-9, "a time")):
        for row in rows.index[~(rows[name] >= least) | ~np.isfinite(rows[name])]:
            refused.setdefault(int(row), f"{name} is {rows[name][row]:g}, less than {word}")
    samples: dict[tuple[Any, ...], list[int]] = {}
    for values, group in rows.drop(index=list(refused)).groupby(ROW, sort=False):
        try:
            key = _key(*values)
        except (ValueError, OverflowError, CatalogError) as error:
            refused |= dict.fromkeys(map(int, group.index), str(error).partition(". ")[0])
            continue
        samples.setdefault(key, []).extend(map(int, group.index))
    size, time = rows["bytes"].to_numpy(float), rows["time_us"].to_numpy(float) * 1e-6
    return [_sample(key, np.array(at), size[at], time[at]) for key, at in samples.items()], refused


def _key(gpu: str, joined: str, op: str, n: float, nodes: float, source: str, algo: str) -> tuple[Any, ...]:
    """Returns what the rows of a sample have in common. Raises ValueError where a row cannot be priced."""
    name = PAIRS.get(gpu) or GPUS.get(gpu)
    if name is None:
        raise ValueError(f"no GPU {gpu!r} in the catalog")
    if op not in OPERATIONS:
        raise ValueError(f"no operation {op!r}")
    if n % 1 or nodes % 1 or n % nodes:
        raise ValueError(f"{n:g} GPUs do not spread evenly over {nodes:g} nodes")
    if OPERATIONS[op] == "p2p" and n != 2:
        raise ValueError("a message has two ends")
    library = find_name(LIBRARIES, source)
    cluster = _cluster(name, joined, int(n), int(nodes))
    if name == "l40s" and n > 2:
        cluster = _without_peer_access(cluster)
    nvls = library != "nccl-tests-int8" and not re.match(r"Ring|Tree", algo)
    return name, op, library, nvls, cluster, int(n), int(nodes)


@cache
def _cluster(gpu: str, joined: str, n: int, nodes: int) -> Cluster:
    """Returns the cluster that the column `interconnect` describes. Raises ValueError where it says too little."""
    usual = load("nodes", load("gpus", gpu).usual_node) if load("gpus", gpu).usual_node else None
    per = max(n // nodes, int(usual.gpus) if usual else 0)
    pairs = bool(re.search(r"pairs?\b|pairwise", joined))
    cards = not re.search("NVLink|Infinity", joined) and "PCIe" in joined
    spec: dict[str, Any] = {"gpu": gpu, "gpus": nodes * per, "gpus_per_node": per}
    if pairs or cards:
        spec["scale_up_domain"] = 2 if pairs else 1
    if nodes > 1 and nodes * per > (usual.domain if usual and usual.domain > per else 0):
        spec["inter"] = _network(joined, per)
    return load_cluster(spec)


@cache
def _without_peer_access(cluster: Cluster) -> Cluster:
    """Returns the same without peer access."""
    never = BooleanFact(value=False, kind="assumed", source="NCCL tables of four and eight L40S")
    node = cluster.node.model_copy(update={"peer_access": never, "staging": STAGING})
    return cluster.model_copy(update={"node": node})


def _network(joined: str, per: int) -> dict[str, Any]:
    """Returns the kind and rate per GPU of the network that is stated."""
    kind = find_name(NETWORKS, joined)
    if not kind or re.search("not stated|unstated", joined):
        raise ValueError("the network between the nodes is not stated")
    ports = re.search(r"(\d+)\s*x\s*(\d+)\s*G", joined)
    whole = re.search(r"([\d.]+)\s*Tb/s per node", joined)
    each = re.search(r"(\d+)\s*G[^,;]*per GPU", joined)
    if ports:
        return {"kind": kind, "gbps_per_gpu": int(ports[1]) * int(ports[2]) / per}
    if whole:
        return {"kind": kind, "gbps_per_gpu": float(whole[1]) * 1000 / per}
    if each:
        return {"kind": kind, "gbps_per_gpu": float(each[1])}
    return {"kind": kind}


def _sample(key: tuple[Any, ...], at: np.ndarray, size: np.ndarray, time: np.ndarray) -> CollectiveSample:
    gpu, op, library, nvls, cluster, n, nodes = key
    per = cluster.gpus // nodes
    ranks = [node * per + place for node in range(nodes) for place in range(n // nodes)]
    place = reach(cluster, ranks)
    message = OPERATIONS[op] == "p2p"
    work = Transfer(size, "all", 0, ranks[-1]) if message else Collective(op, size, ("all",))  # type: ignore[arg-type]
    far = place.nodes.number > 1
    fast = not far and place.domains.number == 1 and cluster.domain >= per
    classes = {"all": np.ones(len(at), bool)}
    if fast and OPERATIONS[op] == "ring":
        classes |= {"node-large": size >= MIB, "node-small": size < MIB}
    if not far and OPERATIONS[op] == "all_to_all":
        classes["alltoall-large"] = size >= MIB
    if far and op == "all_reduce":
        classes["multinode-large"] = size >= 16 * MIB
    section = "network" if far else OPERATIONS[op]
    return CollectiveSample(
        section, gpu, library, at, time, op, classes, cluster=cluster, reach=place, work=work, nvls=nvls
    )
