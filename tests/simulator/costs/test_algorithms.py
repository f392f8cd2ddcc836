"""Algorithms of collectives by cost models written down here: which one is used when, and its time."""

import math

import numpy as np
import pytest

from meshcast.hardware import load_cluster, reach
from meshcast.hardware.load import BooleanFact, assumed_value
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.simulator.costs.collectives import collective, tuner
from meshcast.simulator.costs.collectives.links import (
    AllToAllCostModel,
    LinkCostModels,
    Links,
    NetworkCostModel,
    P2PCostModel,
    RingCostModel,
    TierCostModels,
)
from meshcast.simulator.costs.collectives.tuner import LL, LL128, NVLS, SIMPLE
from meshcast.simulator.ir.ops import Collective

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MIB, GIB = 2**20, 2**30


def plain(model, **values):
    return model(**{name: c.start for name, c in coefficients(model).items()} | values)


LINK = LinkCostModels(plain(RingCostModel), plain(AllToAllCostModel), plain(P2PCostModel))
TIERS = TierCostModels(LINK, LINK, plain(NetworkCostModel))


def links_of(node, nodes=1, models=TIERS, **more):
    return Links(load_cluster({"node": node, "nodes": nodes}), models, **more)


def at(links, ranks):
    return reach(links.cluster, list(ranks))


def seconds(links, operation, nbytes, ranks):
    return collective.price(Collective(operation, nbytes, ("x",)), at(links, ranks), links).seconds


def names(links, operation, ranks):
    return [algorithm.name for algorithm in collective.find_group(operation, at(links, ranks), links).algorithms]


GROUPS = [
    ("dgx-h100", 1, range(8)), ("dgx-h100", 1, range(3)), ("dgx-h100", 16, range(128)),
    ("dgx-h100", 16, range(0, 128, 8)), ("dgx-a100", 2, range(16)), ("dgx-1v", 1, range(6)),
    ("gb200-nvl72", 36, range(144)), ("mi300x-8", 1, range(8)), ("pcie-8xa100", 2, range(16)),
    ("h100-nvl-8", 1, range(8)),
]  # fmt: skip


@pytest.mark.parametrize(("node", "nodes", "ranks"), GROUPS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_sizes_at_once_are_priced_like_each_alone(node, nodes, ranks, operation):
    """And more bytes are never faster, and nothing beats the links."""
    links = links_of(node, nodes)
    place, sizes = at(links, ranks), np.round(2 ** np.linspace(0, 36, 400))
    many = Collective(operation, sizes, ("x",))
    seconds, launch = collective.seconds(many, place, links)
    alone = [collective.price(Collective(operation, int(size), ("x",)), place, links).seconds for size in sizes[::20]]
    assert seconds[::20] == pytest.approx(alone)
    assert (np.diff(seconds) >= 0).all() and (launch <= seconds).all()
    assert (seconds >= collective.lower_bound(many, place, links) * (1 - 1e-12)).all()


def max_bytes(kind, n, operation="all_reduce", nvls=False):
    steps = 2 * (n - 1) if operation == "all_reduce" else n - 1
    return tuner.max_bytes(kind, 1.0, n, steps, host=False, nvls=nvls)


@pytest.mark.parametrize(
    ("kind", "operation", "low", "high"),
    [
        # Measured times jump between these sizes (two GPUs, ai-dynamo/aiconfigurator nccl-tests).
        ("nvlink3", "all_gather", 1 * MIB, 2 * MIB),
        ("nvlink3", "all_reduce", MIB / 2, 2 * MIB),
        ("nvlink4", "all_reduce", MIB / 2, 2 * MIB),
        ("nvlink5", "all_reduce", 2 * MIB, 4 * MIB),
    ],
)
def test_ll_ends_where_measured_times_jump(kind, operation, low, high):
    assert low <= max_bytes(kind, 2, operation)[LL] <= high


def test_each_protocol_is_used_up_to_one_of_a_higher_rate():
    limits = max_bytes("nvlink3", 8)
    assert 0 < limits[LL] < limits[LL128] < limits[SIMPLE] == math.inf
    assert NVLS not in limits


@pytest.mark.parametrize(
    ("kind", "uses"), [("nvlink4", {4: False, 5: True, 8: True}), ("nvlink5", {4: False, 5: False, 6: True, 8: True})]
)
def test_group_sizes_from_which_nvls_is_used(kind, uses):
    """As tables of stas00/ml-engineering and ai-dynamo/aiconfigurator show."""
    for n, used in uses.items():
        limits = max_bytes(kind, n, nvls=True)
        assert (limits[NVLS] == math.inf and limits[SIMPLE] < math.inf) == used, n


def test_nvls_is_used_only_where_it_exists_and_is_allowed():
    h100, a100 = links_of("dgx-h100"), links_of("dgx-a100")
    assert "NVLS" in names(h100, "all_reduce", range(8)) and "NVLS" not in names(a100, "all_reduce", range(8))
    rings = links_of("dgx-h100", nvls=False)
    assert "NVLS" not in names(rings, "all_reduce", range(8))
    assert seconds(rings, "all_reduce", GIB, range(8)) > 1.15 * seconds(h100, "all_reduce", GIB, range(8))
    assert "NVLS" not in names(h100, "all_gather", range(8))


def test_sharp_in_the_network_halves_the_bytes_through_ports():
    tree, sums = (links_of("dgx-h100", 4, sharp=sharp) for sharp in (False, True))
    ratio = seconds(tree, "all_reduce", 16 * GIB, range(32)) / seconds(sums, "all_reduce", 16 * GIB, range(32))
    assert 1.15 < ratio < 1.6, "480 against 370 GB/s, NVIDIA GTC24 s62129"


def test_multiprocessors_that_a_collective_takes():
    links = links_of("dgx-h100")

    def taken(operation, nbytes, ranks=range(8)):
        use = collective.use(Collective(operation, nbytes, ("x",)), at(links, ranks), links)
        return round(use.multiprocessors * links.cluster.gpu.multiprocessors)

    assert taken("all_reduce", GIB) == 16 and taken("all_gather", GIB) == 24
    assert taken("all_gather", 0) == 0 and taken("all_gather", GIB, range(1)) == 0


def test_overhead_of_a_library():
    base, ring = links_of("dgx-a100"), plain(RingCostModel, call_overhead=20e-6)
    other = links_of("dgx-a100", models=TierCostModels(LINK._replace(ring=ring), LINK, TIERS.network))
    for size in (1024, GIB):
        now = seconds(base, "all_gather", size, range(8))
        assert seconds(other, "all_gather", size, range(8)) == pytest.approx(now + 20e-6)
    slow = links_of(
        "dgx-a100", models=TierCostModels(LINK._replace(ring=plain(RingCostModel, rate_ratio=0.8)), LINK, TIERS.network)
    )
    ratio = seconds(slow, "all_gather", 64 * GIB, range(8)) / seconds(base, "all_gather", 64 * GIB, range(8))
    assert ratio == pytest.approx(1 / 0.8, rel=0.01)


def without_peers(node: str, staging: float = 63e9):
    """A node of the catalog whose cards have no peer access, and its links."""
    never = BooleanFact(value=False, kind="assumed", source="a test")
    cluster = load_cluster({"node": node, "nodes": 1})
    changed = {"peer_access": never, "staging": assumed_value(staging, "a test")}
    return Links(cluster.model_copy(update={"node": cluster.node.model_copy(update=changed)}), TIERS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_cards_without_peer_access_share_the_memory_of_the_host(operation):
    """What all cards of the node send at once passes at one rate, however many groups they form."""
    sent = {
        "all_reduce": 2 * 7 / 8,
        "all_gather": 7 / 8,
        "reduce_scatter": 7 / 8,
        "all_to_all": 7 / 8,
        "broadcast": 1.0,
    }
    links = without_peers("pcie-8xa100")
    whole = seconds(links, operation, 64 * GIB, range(8))
    assert whole == pytest.approx(8 * sent[operation] * 64 * GIB / 63e9, rel=0.02)
    fast, direct = without_peers("pcie-8xa100", 1e12), links_of("pcie-8xa100")
    assert seconds(fast, operation, GIB, range(8)) == seconds(direct, operation, GIB, range(8))
    switched = without_peers("dgx-a100"), links_of("dgx-a100")
    assert seconds(switched[0], operation, GIB, range(8)) == seconds(switched[1], operation, GIB, range(8))


def test_groups_of_half_of_a_node_pass_through_its_memory_at_the_same_time():
    links = without_peers("pcie-8xa100")
    half, whole = (seconds(links, "all_gather", 64 * GIB, range(n)) for n in (4, 8))
    assert half / whole == pytest.approx((3 / 4) / (7 / 8), rel=0.01)


def test_bridged_pairs_send_half_as_much_through_the_memory_of_the_host():
    pairs, cards = without_peers("h100-nvl-8"), without_peers("pcie-8xh100")
    ratio = seconds(pairs, "all_gather", 64 * GIB, range(8)) / seconds(cards, "all_gather", 64 * GIB, range(8))
    assert ratio == pytest.approx(1 / 2, rel=0.05)


def test_rings_of_a_cube_mesh_take_two_links_of_a_gpu():
    """Six of eight V100 have three links each, of which rings use two: 45 GB/s were measured, 86 for four of them."""
    links = links_of("dgx-1v")
    six, four = (2 * (n - 1) / n * GIB / seconds(links, "all_reduce", GIB, range(n)) / 1e9 for n in (6, 4))
    assert 38 < six < 50 and four == pytest.approx(2 * six, rel=0.1)


def test_rings_between_racks_use_some_of_their_ports():
    links = links_of("gb200-nvl72", 36)
    rate = 2 * 143 / 144 * 64 * GIB / seconds(links, "all_reduce", 64 * GIB, range(144)) / 1e9
    assert 700 < rate < 900, "793-811 GB/s by two racks, coreweave/nccl-tests"
    port = links.cluster.scale_out.bandwidth
    assert seconds(links, "all_to_all", GIB, range(144)) < 1.5 * GIB * 72 / 144 / port, "all-to-alls use every port"


def test_one_gpu_per_node_gathers_by_pat():
    links = links_of("dgx-h100", 64)
    assert "PAT" in names(links, "all_gather", range(0, 512, 8))
    assert "PAT" not in names(links, "all_gather", range(512))


def test_two_nodes_send_each_byte_once():
    """Between two nodes a tree has no inner node: half the traffic of four."""
    links = links_of("p4de", 4)
    two, four = (seconds(links, "all_reduce", 16 * GIB, range(n)) for n in (16, 32))
    assert four / two == pytest.approx(2, rel=0.15)
