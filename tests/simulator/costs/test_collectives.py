"""Collectives and messages: bounded by the links, monotone, and near published rates."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load, load_cluster, nodes
from meshcast.hardware.node import RateShare
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.collectives import collective
from meshcast.simulator.costs.collectives.links import Links
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.kernel_prices import KernelTraits
from meshcast.simulator.costs.kernels.sections import section_on
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Transfer

SHIPPED = Calibration.shipped()
GIB = 2**30
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "push_pull")
LAYOUTS = [(1, 8), (2, 8), (16, 8), (128, 8), (2, 1), (16, 1), (4, 2), (1, 2), (1, 3)]
"""Nodes with members of a group, and the number of members in each."""


def costs_of(node="dgx-h100", nodes=1, per_node=8, rates=None):
    """Costs of a cluster whose axis dp has `per_node` members in each node."""
    cluster = load_cluster(f"{node}:{nodes}")
    return Costs(
        cluster,
        Mesh({"dp": nodes * per_node, "tp": 8 // per_node}) if 8 % per_node == 0 else Mesh({"outer": nodes, "dp": 8}),
        KernelTraits(rates or {}),
    )


def group(nodes, per_node, node="dgx-h100", **kwargs):
    """Costs, the axes and the members of a group of that layout."""
    costs = costs_of(node, nodes, per_node, **kwargs)
    return costs, ("dp",), None if 8 % per_node == 0 else tuple(range(per_node))


def seconds(made, operation, nbytes):
    costs, axes, members = made
    return costs.estimate(Collective(operation, nbytes, axes, members)).seconds


def bus(made, n, nbytes):
    """Bus bandwidth [GB/s] of an all-reduce, as nccl-tests counts it."""
    return 2 * (n - 1) / n * nbytes / seconds(made, "all_reduce", nbytes) / 1e9


def least(costs, operation, n, k, nbytes):
    """Lower bound of a collective of n members in k domains: bytes that must enter or leave a GPU, and a domain."""
    g = n / k
    if operation == "push_pull":
        return nbytes / (costs.cluster.scale_out if k > 1 else costs.cluster.scale_up).bandwidth
    inside = {"all_reduce": 1.0, "broadcast": 1.0 if g > 1 else 0.0, "all_to_all": (g - 1) / n}.get(
        operation, (n - 1) / n
    )
    across = {"all_reduce": 2 * (k - 1) / k / g, "broadcast": 1 / g, "all_to_all": (n - g) / n}.get(
        operation, (n - g) / n / g
    )
    up, out = costs.cluster.scale_up.bandwidth, costs.cluster.scale_out.bandwidth
    inside = inside if g > 1 else 0.0
    return max(inside * nbytes / up, across * nbytes / out if k > 1 else 0.0)


GROUPS = {(node, *at): group(*at, node=node) for node in ("dgx-a100", "dgx-h100") for at in LAYOUTS}
FAST = {at: group(*at, rates={"communication": 10.0}) for at in LAYOUTS}


@pytest.mark.parametrize("operation", OPERATIONS)
@given(nbytes=st.integers(1, 2**36))
def test_no_collective_beats_the_links(operation, nbytes):
    for key, (costs, axes, members) in [*GROUPS.items(), *((("dgx-h100", *at), group) for at, group in FAST.items())]:
        node, nodes, per_node = key
        work = Collective(operation, nbytes, axes, members)
        (place,) = costs.places.group_reaches(work)
        bound = collective.lower_bound(work, place, costs.communication.links)
        sent = least(costs, operation, nodes * per_node, nodes, nbytes)
        assert sent * (1 - 1e-12) <= bound <= costs.estimate(work).seconds
        if node == "dgx-h100" or operation != "all_reduce":  # whose switches add up; rings send twice as much
            assert bound == pytest.approx(sent)


@given(st.sampled_from(OPERATIONS), st.sampled_from(sorted(GROUPS)), st.integers(1, 2**34), st.integers(1, 2**34))
def test_a_bigger_buffer_is_never_faster(operation, key, nbytes, more):
    assert seconds(GROUPS[key], operation, nbytes + more) > seconds(GROUPS[key], operation, nbytes)


@given(
    st.sampled_from(OPERATIONS),
    st.sampled_from(sorted(GROUPS)),
    st.integers(1, 2**34),
    st.floats(1, 4),
    st.floats(1, 4),
)
def test_faster_links_are_never_slower(operation, key, nbytes, up, out):
    costs, axes, members = GROUPS[key]
    work = Collective(operation, nbytes, axes, members)
    now = costs.estimate(work).seconds
    (reach,) = costs.places.group_reaches(work)
    links = Links(costs.cluster, costs.communication.links.models)
    links.scale_up = replace(links.scale_up, bandwidth=links.scale_up.bandwidth * up)
    links.network = replace(links.network, bandwidth=links.network.bandwidth * out)
    assert collective.price(work, reach, links).seconds <= now


@pytest.mark.parametrize("operation", OPERATIONS)
def test_links_of_half_the_rate_take_twice_as_long(operation):
    node = load("nodes", "dgx-h100")
    half = RateShare(value=0.5, kind="measured", source="a test")
    slow = node.model_copy(update={"scale_up": node.scale_up.model_copy(update={"rate": half})})
    usual = load_cluster("dgx-h100:1")
    now, then = (
        Costs(cluster, Mesh({"dp": 8})).estimate(Collective(operation, 4 * GIB, ("dp",))).seconds
        for cluster in (usual, usual.model_copy(update={"node": slow, "name": "slow"}))
    )
    assert then == pytest.approx(2 * now, rel=0.02)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_member_sends_nothing(operation):
    costs = Costs(load_cluster("dgx-h100:1"), Mesh({"tp": 8}))
    assert costs.estimate(Collective(operation, GIB, ("dp",))) == (0, 0, 0)
    assert costs.estimate(Collective(operation, GIB, ("tp",), (3,))) == (0, 0, 0)
    assert costs.estimate(Collective(operation, 0, ("tp",))) == (0, 0, 0)


@pytest.mark.parametrize(
    ("node", "nodes", "size", "low", "high"),
    [
        ("dgx-h100", 1, GIB, 420, 480),  # measured 445 at 512 MiB, 480 from 8 GiB on, by adding in the switch
        ("dgx-a100", 1, GIB, 220, 240),  # 232-235
        ("dgx-a100", 2, 4 * GIB, 180, 195),  # 188 on eight ports of 200 Gb/s
        ("dgx-h100", 4, 8 * GIB, 350, 390),  # 365-380 on eight ports of 400 Gb/s, from 4 to 1,024 nodes
        ("dgx-h100", 128, 16 * GIB, 350, 390),
        ("dgx-h100", 2, 8 * GIB, 440, 500),  # 470-480 between two nodes that add in their switches
    ],
)
def test_all_reduce_reaches_the_known_bus_bandwidth(node, nodes, size, low, high):
    assert low <= bus(group(nodes, 8, node), 8 * nodes, size) <= high


@pytest.mark.parametrize(("node", "low", "high"), [("dgx-h100", 10e-6, 25e-6), ("dgx-a100", 15e-6, 30e-6)])
def test_a_small_all_reduce_takes_the_known_time(node, low, high):
    assert low <= seconds(group(1, 8, node), "all_reduce", 1024) <= high


def test_all_local_ranks_together_have_all_ports():
    """The group with one member a node has one port, the group with all of a node's GPUs has eight."""
    one, eight = seconds(group(16, 1), "reduce_scatter", 8 * GIB), seconds(group(16, 8), "reduce_scatter", 8 * GIB)
    assert one / eight == pytest.approx(8, rel=0.15)


def test_a_scatter_and_a_gather_are_slower_than_one_all_reduce():
    made = group(1, 8)
    pair = seconds(made, "reduce_scatter", GIB) + seconds(made, "all_gather", GIB)
    assert 1.05 < pair / seconds(made, "all_reduce", GIB) < 1.6


def test_leaving_the_domain_costs():
    for operation in OPERATIONS:
        assert seconds(group(8, 1), operation, GIB) > seconds(group(1, 8), operation, GIB)


# ------------------------------------------------------------------------------------------- levels


def fabric_of(*levels, node="dgx-h100", nodes=64, **more):
    return load_cluster({"node": node, "nodes": nodes, "fabric": {"levels": list(levels), **more}})


FULL = fabric_of({"nodes": 8}, {})
TAPERED = fabric_of({"nodes": 8}, {"oversubscription": 4})


@pytest.mark.parametrize(
    ("axes", "operation", "slower"),
    [
        # 8 nodes of each block: a ring leaves a block by one of eight nodes' ports, four times as wide as is needed.
        ({"dp": 512}, "all_reduce", 1.0),
        # One node of each block: every hop crosses, and so does all else at the same time.
        ({"dp": 8, "pp": 64}, "all_reduce", 4.0),
        ({"dp": 16, "pp": 32}, "reduce_scatter", 4 / 2),  # two nodes of each block
        ({"ep": 512}, "all_to_all", 4 * (512 - 64) / (512 - 8)),
        ({"ep": 64, "rest": 8}, "all_to_all", 4 * (64 - 8) / (64 - 1)),
    ],
)
def test_a_group_pays_for_the_levels_it_crosses(axes, operation, slower):
    mesh, work = Mesh(axes), Collective(operation, 64 * GIB, (next(iter(axes)),))
    ratio = Costs(TAPERED, mesh).estimate(work).seconds / Costs(FULL, mesh).estimate(work).seconds
    assert ratio == pytest.approx(slower, rel=0.02)


def test_a_group_within_a_block_does_not_pay():
    mesh = Mesh({"pp": 8, "ep": 64})
    for work in (Collective("all_to_all", GIB, ("ep",)), Collective("all_reduce", GIB, ("ep",))):
        assert Costs(TAPERED, mesh).estimate(work) == Costs(FULL, mesh).estimate(work)


def test_rings_take_no_notice_of_leaf_switches_that_are_not_described():
    narrow, mesh = fabric_of({"oversubscription": 4}), Mesh({"dp": 512})
    ring, mixed = (Collective(operation, GIB, ("dp",)) for operation in ("all_reduce", "all_to_all"))
    plain = load_cluster("dgx-h100:64")
    assert Costs(narrow, mesh).estimate(ring) == Costs(plain, mesh).estimate(ring)
    assert Costs(narrow, mesh).estimate(mixed).seconds > 3.5 * Costs(plain, mesh).estimate(mixed).seconds


def test_switches_on_the_way_take_time():
    hop = {"value": "1 us", "kind": "assumed", "source": "a test"}
    slow, mesh = fabric_of({"nodes": 8}, {}, hop_latency=hop), Mesh({"pp": 8, "dp": 8, "tp": 8})
    near, far = (Collective("all_gather", 8, axes) for axes in (("dp",), ("pp",)))
    assert Costs(slow, mesh).estimate(near) == Costs(FULL, mesh).estimate(near)
    longer = Costs(slow, mesh).estimate(far).seconds - Costs(FULL, mesh).estimate(far).seconds
    assert longer in (pytest.approx(2e-6 * 7), pytest.approx(2e-6 * 3)), "two switches a step, of a ring or a tree"
    message = Transfer(8, "pp", 0, 1)
    more = Costs(slow, mesh).estimate(message).latency - Costs(FULL, mesh).estimate(message).latency
    assert more == pytest.approx(2e-6)


def regions(latency="10 ms", rate="10 GB/s", links=1, nodes=16):
    stated = {"kind": "assumed", "source": "a test"}
    line = {
        "name": "line",
        "family": "wan",
        "rate": {"value": rate, "direction": "one", **stated},
        "links": {"value": 1, **stated},
        "latency": {"value": latency, **stated},
        "payload": {"value": 0.96, **stated},  # as of the ports, so that shares of it are equal
    }
    return fabric_of({"nodes": nodes // 2}, {"link": line, "links": links}, nodes=nodes)


@pytest.mark.parametrize(
    ("axes", "operation", "passes"),
    [
        # What all groups of a region send over its link, in multiples of their buffers: one group, or eight.
        ({"dp": 128}, "all_reduce", 2 * 127 / 128),
        ({"dp": 128}, "all_gather", 127 / 128),
        ({"pp": 16, "tp": 8}, "reduce_scatter", 8 * 15 / 16),
        ({"ep": 128}, "all_to_all", 64 * 64 / 128),
        ({"outer": 2, "ep": 16, "tp": 4}, "all_to_all", 0.0),  # within a region
    ],
)
def test_what_groups_send_over_a_link_between_regions(axes, operation, passes):
    mesh, nbytes = Mesh(axes), 64 * GIB
    axis = "ep" if "ep" in axes else next(iter(axes))
    work = Collective(operation, nbytes, (axis,))
    far, near = (Costs(cluster, mesh) for cluster in (regions(), fabric_of({"nodes": 8}, {}, nodes=16)))
    if not passes:
        assert far.estimate(work) == near.estimate(work)
        return
    network = far.communication.links.models.network
    share = network.all_to_all_share if operation == "all_to_all" else network.share
    expected = passes * nbytes / (10e9 * 0.96 * share)
    assert far.estimate(work).seconds == pytest.approx(expected, rel=0.03) and expected > near.estimate(work).seconds
    assert far.estimate(work).sigma > near.estimate(work).sigma


@pytest.mark.parametrize(
    ("operation", "crossings"),
    [
        ("all_reduce", 4),  # a ring passes two links twice, a tree two of its levels up and down
        ("all_gather", 2),
        ("broadcast", 2),
        ("all_to_all", 1),
    ],
)
def test_a_small_buffer_waits_for_the_latency_between_regions(operation, crossings):
    mesh, work = Mesh({"dp": 128}), Collective(operation, 1024, ("dp",))
    at_once, later = (Costs(regions(latency), mesh).estimate(work).seconds for latency in ("0 s", "1 s"))
    assert later - at_once == pytest.approx(crossings)
    message = Transfer(8, "pp", 0, 1)
    delays = [Costs(regions(one), Mesh({"pp": 2, "dp": 64})).estimate(message).latency for one in ("0 s", "1 s")]
    assert delays[1] - delays[0] == pytest.approx(1.0)


def test_a_latency_does_not_fill_channels():
    """Chunks follow each other on the wire: a far region adds its latency and no more."""
    mesh, work = Mesh({"dp": 128}), Collective("all_reduce", GIB, ("dp",))
    at_once, later = (Costs(regions(latency), mesh).estimate(work).seconds for latency in ("0 s", "1 s"))
    assert later - at_once == pytest.approx(4.0)


def test_a_link_as_wide_as_the_ports_is_no_limit():
    mesh = Mesh({"dp": 128})
    for operation in OPERATIONS:
        work = Collective(operation, GIB, ("dp",))
        wide = Costs(regions("0 s", "100 TB/s"), mesh).estimate(work).seconds
        assert wide == Costs(fabric_of({"nodes": 8}, {}, nodes=16), mesh).estimate(work).seconds
        assert Costs(regions("0 s", "1 GB/s"), mesh).estimate(work).seconds > 5 * wide


def test_messages_over_a_link_between_regions():
    """All 64 GPUs of a region send at the same time, over one link or over one for each node."""
    mesh, message = Mesh({"pp": 2, "dp": 64}), Transfer(GIB, "pp", 0, 1)
    one, eight = (Costs(regions(links=links), mesh) for links in (1, 8))
    share = one.communication.links.models.network.p2p_share
    assert one.estimate(message).seconds == pytest.approx(64 * GIB / (10e9 * 0.96 * share))
    assert eight.estimate(message).seconds == pytest.approx(one.estimate(message).seconds / 8)


def test_messages_between_rails_climb_a_level():
    made = {"node": "mi300x-8", "nodes": 4, "fabric": {"levels": [{"nodes": 4}, {"oversubscription": 2}]}}
    costs = Costs(load_cluster(made), Mesh({"pp": 32}))
    same, other = Transfer(2**30, "pp", 0, 8), Transfer(2**30, "pp", 0, 9)
    assert costs.estimate(other).seconds == pytest.approx(2 * costs.estimate(same).seconds)


# --------------------------------------------------------------------------------- without a switch


def test_a_group_in_a_mesh_has_the_links_between_its_members():
    costs = Costs(load_cluster("mi300x-8:1"), Mesh({"outer": 2, "inner": 4}))
    whole = Costs(load_cluster("mi300x-8:1"), Mesh({"all": 8}))
    half, full = (
        made.estimate(Collective("all_gather", GIB, (axis,))).seconds
        for made, axis in ((costs, "inner"), (whole, "all"))
    )
    assert half / full == pytest.approx(7 / 3, rel=0.1)
    pair = costs.estimate(Transfer(GIB, "inner", 0, 1)).seconds
    assert GIB / 64e9 < pair < 1.3 * GIB / 64e9, "one link of seven"


def test_pairs_of_a_cube_mesh():
    costs = Costs(load_cluster("dgx-1v:1"), Mesh({"pp": 8}))
    double, none = (costs.estimate(Transfer(GIB, "pp", 0, other)).seconds for other in (3, 6))
    assert 0.9 * GIB / 50e9 < double < 1.3 * GIB / 50e9 and GIB / 15.75e9 < none < 1.3 * GIB / 15.75e9
    assert any("nvlink3" in one for one in costs.assumed) == (not SHIPPED.sections("nvlink2"))
    assert 100 < 2 * 7 / 8 * GIB / costs.estimate(Collective("all_reduce", GIB, ("pp",))).seconds / 1e9 < 140  # 122-135


# ---------------------------------------------------------------------------------------- over the host


def test_cards_without_links_talk_over_the_host():
    costs = Costs(load_cluster("pcie-8xa100:2"), Mesh({"dp": 2, "tp": 8}))
    work = Collective("all_reduce", GIB, ("tp",))
    assert 19 < 2 * 7 / 8 * GIB / costs.estimate(work).seconds / 1e9 < 28  # 24 GB/s on PCIe 4, NVIDIA GTC24 s62129
    assert 0.05 < costs.estimate(work).sigma < 0.5
    near, far = (costs.estimate(Transfer(GIB, axis, 0, 1)).seconds for axis in ("tp", "dp"))
    assert GIB / 31e9 < near < 1.3 * GIB / 31e9 < far, "a node's port serves two cards"


def test_bridged_cards_leave_their_bridge_over_the_host():
    costs = Costs(load_cluster("h200-nvl-8:1"), Mesh({"dp": 2, "tp": 4}))
    inside, whole, across = (
        costs.estimate(Collective("all_gather", GIB, axes)).seconds for axes in (("tp",), ("dp", "tp"), ("dp",))
    )
    assert inside < 1.5 * GIB * 3 / 4 / 450e9
    # Both halves exchange over four cards' PCIe at a time; a pair has one card of each.
    assert whole > GIB * 7 / 8 / 4 / 63e9 and across > GIB / 2 / 63e9 and across > inside
    near, far = (costs.estimate(Transfer(GIB, axis, 0, 1)).seconds for axis in ("tp", "dp"))
    assert GIB / 150e9 < near < 1.3 * GIB / 150e9 and GIB / 63e9 < far < 1.3 * GIB / 63e9


@pytest.mark.parametrize("node", nodes())
def test_every_node_of_the_catalog_can_be_priced(node):
    cluster = load_cluster({"node": node, "nodes": 36})
    costs = Costs(cluster, Mesh({"dp": cluster.gpus // 4, "tp": 4}))
    tier = cluster.scale_up if cluster.node.domain >= 4 else cluster.host
    far = cluster.scale_out if cluster.gpus > cluster.local_gpus else tier  # all of it is a part of a pod of TPUs
    unknown = cluster.staged and cluster.node.staging is None  # machines differ by a factor of three
    for operation in OPERATIONS:
        inner, outer = (costs.estimate(Collective(operation, GIB, (axis,))) for axis in ("tp", "dp"))
        # Both cards of a bridged pair reach other pairs, and all GPUs of an island in the group other islands.
        assert inner.seconds > 0.5 * GIB / tier.bandwidth / min(2, cluster.node.domain)
        assert 0 < inner.sigma < (1.25 if unknown else 0.65)
        assert outer.seconds > 0.5 * GIB / far.bandwidth / (cluster.node.local_gpus // 4)
    owns = {section_on(one, cluster.gpu) for one in ("gemm", "attention", "memory")} <= set(
        SHIPPED.sections(cluster.gpu.name)
    )
    assert owns == (not any(cluster.gpu.name in one for one in costs.assumed))


def test_the_latency_of_a_large_group_grows_with_the_logarithm():
    small, large = (seconds(group(k, 8), "all_reduce", 1024) for k in (16, 128))
    assert large / small == pytest.approx(math.log2(128) / math.log2(16), rel=0.3)
