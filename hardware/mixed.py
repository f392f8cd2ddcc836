"""Clusters of several kinds of nodes.

A pipeline stage whose ranks all lie on nodes of a single kind runs at that kind's figures. For other stages a forecast
uses a node that is as slow as the slowest kind in every figure, which is a lower bound of the speed: no real GPU of
the cluster has less memory, fewer FLOP/s or narrower links.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from meshcast.hardware.cluster import Cluster, Fabric, NodeGroup
from meshcast.hardware.gpu import GPU
from meshcast.hardware.load import Strict, Value, assumed_value, catalog_model
from meshcast.hardware.node import Host, NICs, Node, ScaleUp
from meshcast.hardware.schemas import Field


@catalog_model("clusters", key="groups", make=lambda form: form.cluster())
class ByGroups(Strict):
    """A cluster described by groups of nodes, in the order of their ranks.

    Attributes:
        fabric: its `blocks` count nodes as the groups list them, other levels those of the smallest size.
    """

    name: str = ""
    title: str = ""
    source: str = ""
    groups: Annotated[tuple[NodeGroup, ...], Field(min_length=1)]
    fabric: Fabric = Fabric()

    def cluster(self) -> Cluster:
        """Returns the same cluster as nodes of a single kind. Raises ValueError("rule. remedy") if that is
        impossible."""
        kinds = {group.node.name: group.node for group in self.groups}
        sizes = {int(node.gpus) for node in kinds.values()}
        size = min(sizes)
        if odd := [other for other in sizes if other % size]:
            raise ValueError(
                f"nodes of {size} and of {odd[0]} GPUs do not nest. Use nodes whose sizes are multiples of each other"
            )
        node = slowest([*kinds.values()], size)
        names = " and ".join(kinds)
        note = f"cluster.groups: where ranks of a stage lie on several kinds, each is as slow as the slowest of {names}"
        return Cluster(
            name=self.name or " + ".join(f"{group.node.name}:{group.nodes}" for group in self.groups),
            title=self.title,
            source=self.source,
            node=node,
            nodes=sum(group.nodes * int(group.node.gpus) for group in self.groups) // size,
            fabric=self._fabric(size),
            groups=self.groups,
            assumed=(note,) if len(kinds) > 1 else (),
        )

    def _fabric(self, size: int) -> Fabric:
        """Returns the fabric with all blocks counted in nodes of `size` GPUs."""
        counts = [int(group.node.gpus) // size for group in self.groups for _ in range(group.nodes)]
        levels = []
        for level in self.fabric.levels:
            if level.blocks:
                if sum(level.blocks) != len(counts):
                    nodes = f"blocks of {sum(level.blocks):,} nodes in groups of {len(counts):,}"
                    raise ValueError(f"{nodes}. Correct one of the two")
                listed = iter(counts)
                blocks = tuple(sum(islice(listed, nodes)) for nodes in level.blocks)
                level = level.model_copy(update={"blocks": blocks})
            levels.append(level)
        return self.fabric.model_copy(update={"levels": tuple(levels)})


def slowest(nodes: list[Node], size: int) -> Node:
    """Returns a node of `size` GPUs that is as slow as the slowest of `nodes` in every figure."""
    if len(nodes) == 1:
        return nodes[0]
    domain = min(node.domain for node in nodes)
    ups = [node.scale_up for node in nodes if node.scale_up and node.domain > 1]
    return Node(
        name="+".join(node.name for node in nodes),
        gpu=_gpu([node.gpu for node in nodes]),
        gpus=assumed_value(size, "the smallest node of the groups"),
        scale_up=_scale_up(ups, domain) if domain > 1 else None,
        nics=_nics(nodes, size),
        host=_host(nodes, size),
        peer_access=next((node.peer_access for node in nodes if node.peer_access and not node.peer_access.value), None),
        staging=_staging(nodes, size),
    )


def _gpu(gpus: list[GPU]) -> GPU:
    slow = min(gpus, key=lambda gpu: max(gpu.peak.values()))
    keys = ("memory", "memory_bandwidth", "l2", "multiprocessors")
    figures: dict[str, Any] = {key: min(getattr(gpu, key) for gpu in gpus) for key in keys}
    peak = {key: min(gpu.peak[key] for gpu in gpus) for key in slow.peak if all(key in gpu.peak for gpu in gpus)}
    host = min((gpu.host for gpu in gpus), key=lambda link: link.bandwidth)
    if (peak, host) == (slow.peak, slow.host) and all(getattr(slow, key) == least for key, least in figures.items()):
        return slow  # the slowest in every figure, or the only kind
    return GPU(
        name="+".join(dict.fromkeys(gpu.name for gpu in gpus)),
        architecture=slow.architecture,
        peak=peak,
        power=max(gpu.power for gpu in gpus),
        scale_up=slow.scale_up,
        host=host,
        peer_access=next((gpu.peer_access for gpu in gpus if gpu.peer_access and not gpu.peer_access.value), None),
        usual_node=slow.usual_node,
        usable=min(gpus, key=lambda gpu: gpu.program_memory).usable,
        **figures,
    )


def _scale_up(ups: list[ScaleUp], domain: int) -> ScaleUp:
    up = min(ups, key=lambda up: (up.switched.value, up.link.bandwidth))
    narrow = min(up.link.bandwidth for up in ups)
    link = up.link
    if link.bandwidth > narrow:
        link = link.model_copy(update={"rate": assumed_value(narrow / link.links, "the narrowest links of the groups")})
    rate = min((up.rate for up in ups if up.rate), key=lambda fact: fact.value, default=None)
    domains = assumed_value(domain, "the smallest domain of the groups")
    return up.model_copy(update={"link": link, "domain": domains, "rate": rate})


def _host(nodes: list[Node], size: int) -> Host | None:
    """Returns a host with, for each GPU, the least of the figures that are known of all hosts."""
    hosts = [(int(node.gpus), node.host) for node in nodes if node.host]
    if len(hosts) < len(nodes):
        return None
    figures: dict[str, Value] = {}
    for key in Host.model_fields:
        rates = [getattr(host, key) / gpus for gpus, host in hosts if getattr(host, key)]
        if rates and (key == "uplinks" or len(rates) == len(hosts)):
            figures[key] = assumed_value(min(rates) * size, "the slowest host of the groups")
    return Host(**figures)  # type: ignore[arg-type]


def _staging(nodes: list[Node], size: int) -> Value | None:
    """Returns the least rate, for each GPU, at which a host copies between its GPUs, of those that are known."""
    rates = [node.staging / node.gpus for node in nodes if node.staging]
    return assumed_value(min(rates) * size, "the slowest host of the groups") if rates else None


def _nics(nodes: list[Node], size: int) -> NICs | None:
    ports = [(int(node.gpus), node.nics) for node in nodes if node.nics]
    if len(ports) < len(nodes):
        return None
    gpus, nics = min(ports, key=lambda ports: ports[1].link.bandwidth * ports[1].count / ports[0])
    rails = min((nics.rail_optimised for _, nics in ports), key=lambda fact: fact.value)
    count = (
        nics.count if gpus == size else assumed_value(nics.count * size / gpus, "its share of the slowest node's ports")
    )
    return nics.model_copy(update={"count": count, "rail_optimised": rails})
