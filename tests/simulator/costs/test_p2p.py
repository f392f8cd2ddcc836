"""Messages between nodes: who sends at the same time shares the ports, and nobody else does."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load, load_cluster, reach
from meshcast.hardware.load import BooleanFact
from meshcast.simulator.costs.collectives import collective, p2p
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.estimate import ALONE, NOTHING
from meshcast.simulator.costs.kernel_prices import KernelTraits
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Gemm, Transfer

MIB = 2**20
NODES = ("pcie-8xa100", "dgx-2", "p4d", "l40s-4", "jean-zay-a100", "dgx-1v", "dgx-a100", "p5")


def boards(ports: int, nodes: int = 4):
    """Nodes of eight A100 behind `ports` ports of 25 GB/s together."""
    inter = {"kind": "infiniband", "gbps_per_gpu": 25, "ports": ports}
    return load_cluster(
        {"gpu": "a100-sxm-80", "gpus_per_node": 8, "scale_up_domain": 8, "gpus": 8 * nodes, "inter": inter}
    )


def moved_per_s(costs: Costs, work) -> float:
    """Rate of a large message, over the share of the ports' payload rate that one message reaches [bytes/s]."""
    share = costs.communication.links.models.network.p2p_share * costs.communication.links.network.payload
    return work.nbytes / costs.estimate(work).seconds / share


def port_of(cluster, rank: int) -> int:
    """The nearest port of a GPU, or its own ports where there are as many as GPUs."""
    return int(rank % cluster.gpus_per_node * min(1, cluster.node.nics.count / cluster.gpus_per_node))


def test_a_hop_of_one_gpu_a_node_has_the_whole_port():
    costs = Costs(boards(1), Mesh({"cp": 32}))
    hop = Collective("shift", 64 * MIB, ("cp",))
    assert moved_per_s(costs, hop) == pytest.approx(25e9), "one GPU of each node sends to the next node"


def test_a_ring_attention_hop_and_a_ring_all_gather_agree_about_the_border():
    """A ring over whole nodes crosses their border once, whether NCCL's steps or explicit messages make it."""
    costs = Costs(boards(1), Mesh({"cp": 32}))
    (reach,) = costs.places.group_reaches(Collective("all_gather", MIB, ("cp",)))
    gather = collective.find_group("all_gather", reach, costs.communication.links)
    (simple,) = (algorithm for algorithm in gather.algorithms if algorithm.name == "ring Simple")
    of_steps = (
        31
        / 32
        / simple.byte
        / costs.communication.links.models.network.share
        / costs.communication.links.network.payload
    )
    assert of_steps == pytest.approx(moved_per_s(costs, Collective("shift", 64 * MIB, ("cp",))))


@pytest.mark.parametrize(
    ("ports", "tp", "sharing", "dp"),
    [
        *((1, 1, 1, 1), (1, 2, 2, 1), (1, 8, 8, 1), (4, 1, 1, 1), (4, 2, 2, 1), (4, 4, 2, 1), (4, 8, 2, 1)),
        *((8, 8, 1, 1), (2, 2, 2, 1), (2, 8, 4, 1)),
        (1, 2, 8, 4),  # replicas send at once, too
    ],
)
def test_ranks_that_send_at_once_share_the_ports(ports, tp, sharing, dp):
    """The last stage of a node sends to the first one of the next, each of its ranks through the nearest port."""
    inner = tp * dp
    costs = Costs(boards(ports), Mesh({"pp": 32 // inner, "dp": dp, "tp": tp}))
    message = Transfer(64 * MIB, "pp", 8 // inner - 1, 8 // inner)
    assert moved_per_s(costs, message) == pytest.approx(25e9 / ports / sharing)


def test_all_shifts_of_an_all_to_all_move_what_the_all_to_all_moves():
    costs = Costs(boards(1, 2), Mesh({"ep": 16}))
    shifts = sum(1 / moved_per_s(costs, Collective("shift", MIB, ("ep",), by=by)) for by in range(1, 16))
    assert shifts == pytest.approx(8 * 8 / 25e9), "eight GPUs send to eight others through one port"


def test_a_gpu_alone_gets_no_more_than_its_own_link_to_the_host():
    costs = Costs(load_cluster("l40s-4:2"), Mesh({"cp": 8}))
    assert moved_per_s(costs, Collective("shift", 64 * MIB, ("cp",))) == pytest.approx(31e9), "a port has 50 GB/s"


@pytest.mark.parametrize(
    ("node", "target", "tier", "share", "channels"),
    [
        ("dgx-h100", 1, 0, 1.0, 24),
        ("mi300x-8", 1, 0, 1 / 7, 2),  # one link of seven
        ("dgx-1v", 6, 1, 1.0, 2),  # no link: over the host
        ("pcie-8xa100", 1, 1, 1.0, 2),
        ("dgx-h100", 8, 2, 1.0, 4),  # channels of 14 GB/s for a port of 50
        ("pcie-8xa100", 8, 2, 1.0, 1),
    ],
)
@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_a_message_has_the_latencies_of_its_way_and_occupies_its_links_alone(
    node: str, target: int, tier: int, share: float, channels: int, delay: float
) -> None:
    cluster = load_cluster(f"{node}:2")
    links, pair = Costs(cluster, Mesh({"pp": cluster.gpus})).communication.links, reach(cluster, [0, target])
    pair = replace(pair, levels=tuple(level._replace(latency=delay) for level in pair.levels))
    price, use = p2p.price(2**30, pair, links), p2p.use(2**30, pair, links)
    models, network = (links.models.scale_up.p2p, links.models.host.p2p), links.models.network
    own = network.p2p_latency + delay if tier == 2 else models[tier].latency
    assert price.latency == pytest.approx(own + (links.scale_up, links.host, links.network)[tier].latency)
    assert use.links == pytest.approx([share * (number == tier) for number in range(3)])
    assert use.multiprocessors * cluster.gpu.multiprocessors == pytest.approx(channels)
    rate = (links.scale_up.bandwidth * share, links.host.bandwidth, links.port_rate(pair))[tier]
    assert 2**30 / rate == pytest.approx(p2p.lower_bound(2**30, pair, links))
    assert 2**30 / rate <= use.moving <= price.seconds < 1.5 * 2**30 / rate
    assert p2p.use(0, pair, links) == ALONE and p2p.price(0, pair, links) == NOTHING


@given(st.sampled_from(NODES), st.integers(0, 2), st.integers(0, 2), st.integers(1, 31))
def test_no_port_carries_more_than_its_rate(node, outer, inner, by):
    """Counted rank by rank: what leaves and enters each port in the time of a shift."""
    cluster = load_cluster(f"{node}:4")
    size, nics = cluster.gpus_per_node, cluster.node.nics
    axes = {"outer": 2**outer, "cp": cluster.gpus >> outer >> inner, "inner": 2**inner}
    costs, n = Costs(cluster, Mesh(axes)), axes["cp"]
    if by % n == 0:
        return
    carried = Counter[tuple[str, int, int]]()
    for rank in range(cluster.gpus):
        place = rank // axes["inner"] % n
        target = rank + ((place + by) % n - place) * axes["inner"]
        if rank // size != target // size:
            carried["out", rank // size, port_of(cluster, rank)] += 1
            carried["in", target // size, port_of(cluster, target)] += 1
    seconds = costs.estimate(Collective("shift", 64 * MIB, ("cp",), by=by)).seconds
    rate = nics.link.bandwidth * max(1, nics.count / size)
    assert seconds >= 64 * MIB * max(carried.values(), default=0) / rate


def test_messages_through_the_memory_of_the_host_share_it_by_who_sends():
    """Eight cards without peer access, of which one, two or all send at once."""
    never = BooleanFact(value=False, kind="assumed", source="a test")
    node = load("nodes", "pcie-8xa100").model_copy(update={"peer_access": never})
    cluster = load_cluster("pcie-8xa100:1").model_copy(update={"node": node})

    def rate(axes, work) -> float:
        return work.nbytes / Costs(cluster, Mesh(axes)).estimate(work).seconds

    big = 2**36
    everyone = rate({"cp": 8}, Collective("shift", big, ("cp",)))
    assert everyone == pytest.approx(cluster.staging / 8, rel=1e-3)
    four = rate({"pp": 2, "tp": 4}, Transfer(big, "pp", 0, 1))
    assert four == pytest.approx(cluster.staging / 4, rel=1e-3)
    alone = rate({"pp": 8}, Transfer(big, "pp", 0, 1))
    direct = big / Costs(load_cluster("pcie-8xa100:1"), Mesh({"pp": 8})).estimate(Transfer(big, "pp", 0, 1)).seconds
    assert alone == pytest.approx(direct), "one card reaches what its own link does"
    assumed = Costs(cluster, Mesh({"tp": 8})).assumed
    assert sum("without peer access" in one for one in assumed) == 1
    assert Costs(cluster, Mesh({"tp": 8})).estimate(Collective("all_gather", big, ("tp",))).sigma > 1


def test_eight_l20_of_flux():
    """FLUX (bytedance/flux @19831ca, docs/performance.md): NCCL gathers 4096 x 12288 elements in 16 bits over
    eight L20 in 11.2 ms, and reduces and scatters as much in 12.3; the product with 12288 x 6144 takes 5.75 ms."""
    costs = Costs(load_cluster("l20-8:1"), Mesh({"tp": 8}), KernelTraits(alone=True))
    gather, scatter = (
        costs.estimate(Collective(operation, 4096 * 12288 * 2, ("tp",))).seconds
        for operation in ("all_gather", "reduce_scatter")
    )
    assert 0.85 < gather / 11.2e-3 < 1.15 and 0.85 < scatter / 12.273e-3 < 1.15
    assert not any("peer access" in one for one in costs.assumed), "its node states the rate of its host"
    assert 0.3 < costs.estimate(Collective("all_gather", MIB, ("tp",))).sigma < 0.7
    assert 0.9 < costs.estimate(Gemm(4096, 6144, 12288)).seconds / 5.746e-3 < 1.1


@pytest.mark.parametrize("operation", ["shift", "all_to_all"])
def test_copies_that_a_program_makes_itself_go_where_the_driver_lets_them(operation):
    never = BooleanFact(value=False, kind="assumed", source="a test")
    through = load_cluster("l20-8:1")
    plain = {"node": through.node.model_copy(update={"peer_copies": None})}
    locked = {"node": through.node.model_copy(update={"gpu": through.gpu.model_copy(update={"peer_access": never})})}
    direct = {"node": through.node.model_copy(update={"peer_access": None})}

    def seconds(changes, sms) -> float:
        costs = Costs(through.model_copy(update=changes), Mesh({"tp": 8}))
        return costs.estimate(Collective(operation, 2**30, ("tp",), sms=sms)).seconds

    by_nccl, itself = seconds({}, None), seconds({}, 0)
    assert itself == pytest.approx(seconds(direct, 0)) and itself < by_nccl / 2
    assert seconds(plain, 0) == seconds(locked, 0) == by_nccl
