"""The ways of collectives, by laws written down here: which one is used when, and what it takes."""

import math
from dataclasses import fields

import numpy as np
import pytest

from hardware import load_cluster, reach
from simulator.costs.coefficients import coefficients
from simulator.costs.collectives import collective, tuner
from simulator.costs.collectives.links import Laws, LinkLaw, Links, MessageLaw, NetworkLaw, PairLaw, RingLaw
from simulator.costs.collectives.tuner import LINE, QUICK, SWITCH, WHOLE
from simulator.ir.ops import Collective

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MIB, GIB = 2**20, 2**30


def plain(law, **values):
    return law(**{name: c.start for name, c in coefficients(law).items()} | values)


LINK = LinkLaw(plain(RingLaw), plain(PairLaw), plain(MessageLaw))
LAWS = Laws(LINK, LINK, plain(NetworkLaw))


def links_of(node, nodes=1, laws=LAWS, **more):
    return Links(load_cluster({"node": node, "nodes": nodes}), laws, **more)


def at(links, ranks):
    return reach(links.cluster, list(ranks))


def seconds(links, operation, nbytes, ranks):
    return collective.price(Collective(operation, nbytes, ("x",)), at(links, ranks), links).seconds


def names(links, operation, ranks):
    return [way.name for way in collective.known(operation, at(links, ranks), links).ways]


@pytest.mark.parametrize("law", [RingLaw, PairLaw, MessageLaw, NetworkLaw])
def test_laws_have_few_coefficients_within_their_bounds(law):
    known = coefficients(law)
    assert all(c.low <= c.start <= c.high for c in known.values())
    assert sum(c.of == "gpu" for c in known.values()) <= 12 and sum(c.of == "library" for c in known.values()) <= 4
    assert {f.name for f in fields(law)} - set(known) == {"spread", "spread_short"}


GROUPS = [
    ("dgx-h100", 1, range(8)),
    ("dgx-h100", 1, range(3)),
    ("dgx-h100", 16, range(128)),
    ("dgx-h100", 16, range(0, 128, 8)),
    ("dgx-a100", 2, range(16)),
    ("dgx-1v", 1, range(6)),
    ("gb200-nvl72", 36, range(144)),
    ("mi300x-8", 1, range(8)),
    ("pcie-8xa100", 2, range(16)),
    ("h100-nvl-8", 1, range(8)),
]


@pytest.mark.parametrize(("node", "nodes", "ranks"), GROUPS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_many_sizes_at_once_are_priced_like_each_alone(node, nodes, ranks, operation):
    """And more bytes are never faster, and nothing beats the links."""
    links = links_of(node, nodes)
    spread, sizes = at(links, ranks), np.round(2 ** np.linspace(0, 36, 400))
    many = Collective(operation, sizes, ("x",))
    told, launch = collective.seconds(many, spread, links)
    alone = [collective.price(Collective(operation, int(size), ("x",)), spread, links).seconds for size in sizes[::20]]
    assert told[::20] == pytest.approx(alone)
    assert (np.diff(told) >= 0).all() and (launch <= told).all()
    assert (told >= collective.least(many, spread, links) * (1 - 1e-12)).all()


# ------------------------------------------------------------------------------------------- tuner


def limits(kind, n, operation="all_reduce", sums=False):
    steps = 2 * (n - 1) if operation == "all_reduce" else n - 1
    return tuner.limits(kind, 1.0, n, steps, host=False, sums=sums)


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
def test_the_quick_protocol_ends_where_measured_times_jump(kind, operation, low, high):
    assert low <= limits(kind, 2, operation)[QUICK] <= high


def test_each_way_is_used_up_to_a_wider_one():
    told = limits("nvlink3", 8)
    assert 0 < told[QUICK] < told[LINE] < told[WHOLE] == math.inf
    assert SWITCH not in told


@pytest.mark.parametrize(
    ("kind", "uses"),
    [("nvlink4", {4: False, 5: True, 8: True}), ("nvlink5", {4: False, 5: False, 6: True, 8: True})],
)
def test_groups_from_which_switches_add(kind, uses):
    """As tables of stas00/ml-engineering and ai-dynamo/aiconfigurator show."""
    for n, used in uses.items():
        told = limits(kind, n, sums=True)
        assert (told[SWITCH] == math.inf and told[WHOLE] < math.inf) == used, n


def test_switches_add_only_where_they_can_and_may():
    h100, a100 = links_of("dgx-h100"), links_of("dgx-a100")
    assert "switch" in names(h100, "all_reduce", range(8)) and "switch" not in names(a100, "all_reduce", range(8))
    rings = links_of("dgx-h100", switch_sums=False)
    assert "switch" not in names(rings, "all_reduce", range(8))
    assert seconds(rings, "all_reduce", GIB, range(8)) > 1.15 * seconds(h100, "all_reduce", GIB, range(8))
    assert "switch" not in names(h100, "all_gather", range(8))


def test_a_network_that_adds_halves_what_goes_through_ports():
    tree, sums = (links_of("dgx-h100", 4, network_sums=told) for told in (False, True))
    ratio = seconds(tree, "all_reduce", 16 * GIB, range(32)) / seconds(sums, "all_reduce", 16 * GIB, range(32))
    assert 1.15 < ratio < 1.6, "480 against 370 GB/s, NVIDIA GTC24 s62129"


def test_multiprocessors_that_a_collective_takes():
    links = links_of("dgx-h100")

    def taken(operation, nbytes, ranks=range(8)):
        return collective.multiprocessors(Collective(operation, nbytes, ("x",)), at(links, ranks), links)

    assert taken("all_reduce", GIB) == 16 and taken("all_gather", GIB) == 24
    assert taken("all_gather", 0) == 0 and taken("all_gather", GIB, range(1)) == 0


# ---------------------------------------------------------------------------------------- topology


def test_what_a_library_adds():
    base, ring = links_of("dgx-a100"), plain(RingLaw, call=20e-6)
    other = links_of("dgx-a100", laws=Laws(LINK._replace(ring=ring), LINK, LAWS.outer))
    for size in (1024, GIB):
        now = seconds(base, "all_gather", size, range(8))
        assert seconds(other, "all_gather", size, range(8)) == pytest.approx(now + 20e-6)
    slow = links_of("dgx-a100", laws=Laws(LINK._replace(ring=plain(RingLaw, rate=0.8)), LINK, LAWS.outer))
    ratio = seconds(slow, "all_gather", 64 * GIB, range(8)) / seconds(base, "all_gather", 64 * GIB, range(8))
    assert ratio == pytest.approx(1 / 0.8, rel=0.01)


def test_staged_copies_crowd_the_host():
    staged = LINK._replace(ring=plain(RingLaw, crowd=2.0))
    links = links_of("pcie-8xa100", laws=Laws(staged, staged, LAWS.outer))
    two, eight = (2 * (n - 1) / n * GIB / seconds(links, "all_reduce", GIB, range(n)) for n in (2, 8))
    assert two / eight == pytest.approx(16, rel=0.05)
    bridged = links_of("dgx-a100", laws=Laws(staged, staged, LAWS.outer))
    assert seconds(bridged, "all_reduce", GIB, range(8)) == seconds(links_of("dgx-a100"), "all_reduce", GIB, range(8))


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


def test_one_gpu_per_node_gathers_in_logarithmic_steps():
    links = links_of("dgx-h100", 64)
    assert "logarithmic" in names(links, "all_gather", range(0, 512, 8))
    assert "logarithmic" not in names(links, "all_gather", range(512))


def test_two_nodes_send_each_byte_once():
    """Between two islands a tree has no inner node: half the traffic of four."""
    links = links_of("p4de", 4)
    two, four = (seconds(links, "all_reduce", 16 * GIB, range(n)) for n in (16, 32))
    assert four / two == pytest.approx(2, rel=0.15)
