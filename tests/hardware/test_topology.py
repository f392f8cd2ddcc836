import math
from typing import Any

import pytest

from meshcast.hardware import CatalogError, Parts, Reach, load_cluster, reach
from meshcast.hardware.topology import Crossing, message_reach, torus_shape

DGX = load_cluster("dgx-h100:8")
RACK = load_cluster(
    {
        **{"gpu": "h100-sxm", "gpus": 144, "gpus_per_node": 4, "scale_up_domain": 72},
        "inter": {"kind": "infiniband", "gbps_per_gpu": 400},
    }
)
PARTS = load_cluster({"gpu": "a100-sxm-80", "gpus": 16, "gpus_per_node": 8, "scale_up_domain": 2})
CARDS = load_cluster("l40s-4:2")
MESH = load_cluster("mi300x-8:2")
CUBE = load_cluster("dgx-1v:1")
TORUS = load_cluster({"gpu": "tpu-v3", "gpus": 64})  # 8 x 8


def spread(members: int, domains: tuple[int, int], nodes: tuple[int, int] | None = None, **more: Any) -> Reach:
    """A `Reach` on a plain fabric; nodes are domains if not given."""
    inside = Parts(*(nodes or domains))
    levels = (Crossing(1.0, inside.fewest),) if inside.number > 1 else ()
    return Reach(members, Parts(*domains), inside, **{"levels": levels, **more})


@pytest.mark.parametrize(
    ("cluster", "ranks", "expected"),
    [
        (DGX, range(8, 16), spread(8, (1, 8))),  # tp 8 in a node
        (DGX, range(4, 8), spread(4, (1, 4))),  # tp 4: two in a node
        (DGX, range(3, 64, 8), spread(8, (8, 1))),  # dp 8 across nodes, one rank in each
        (DGX, range(0, 64, 4), spread(16, (8, 2))),  # dp 16, two ranks in a node
        (DGX, range(6, 10), spread(4, (2, 2))),  # straddles two nodes
        (DGX, range(5, 17), spread(12, (3, 1))),  # 3 + 8 + 1
        (DGX, [63], spread(1, (1, 1))),
        (RACK, range(8), spread(8, (1, 8))),  # two trays, one NVLink domain
        (RACK, range(72), spread(72, (1, 72))),
        (RACK, range(0, 144, 72), spread(2, (2, 1))),
        (PARTS, range(8), spread(8, (4, 2), (1, 8))),  # bridged pairs: a node has four domains
        (PARTS, range(16), spread(16, (8, 2), (2, 8))),
        (CARDS, range(4), spread(4, (4, 1), (1, 4))),  # PCIe alone
        (CARDS, range(2, 8), spread(6, (6, 1), (2, 2))),
        (MESH, range(8), spread(8, (1, 8), links=1.0)),
        (MESH, range(2), spread(2, (1, 2), links=1 / 7)),  # one link of seven
        (MESH, range(4, 8), spread(4, (1, 4), links=3 / 7)),
        (MESH, [0, 8], spread(2, (2, 1))),  # the network alone
        (CUBE, range(8), spread(8, (1, 8))),
        (CUBE, range(4), spread(4, (1, 4), links=4 / 6)),  # GPU 0: links 1 + 1 + 2 of six
        (CUBE, [0, 3], spread(2, (1, 2), links=2 / 6)),
        (CUBE, [0, 6], spread(2, (2, 1), (1, 2))),  # no link: over the host
        # Half of 64 ranks send half of their bytes over the 16 links in the middle: a link passes those of one rank.
        (TORUS, range(64), spread(64, (1, 64), hops=4.0)),
        (TORUS, range(8), spread(8, (1, 8), links=2 / 4, hops=2.0)),  # around one axis
        (TORUS, range(0, 64, 8), spread(8, (1, 8), links=2 / 4, hops=2.0)),
        (TORUS, range(4), spread(4, (1, 4), links=1 / 4)),  # half of an axis: there and back
        (TORUS, range(2), spread(2, (1, 2), links=1 / 4)),
    ],
)
def test_reach(cluster, ranks, expected) -> None:  # type: ignore[no-untyped-def]
    found = reach(cluster, ranks)
    assert math.isclose(found.links, expected.links)
    assert found == Reach(**{**expected.__dict__, "links": found.links})


@pytest.mark.parametrize("ranks", [[], [-1, 0], [0, 64]])
def test_ranks_must_exist(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="from 0 to 63"):
        reach(DGX, ranks)


LEVELS = {"levels": [{"nodes": 4}, {"nodes": 16, "oversubscription": 2}, {"oversubscription": 5}]}
TALL = load_cluster({"node": "dgx-h100", "nodes": 64, "fabric": LEVELS})


@pytest.mark.parametrize(
    ("ranks", "levels"),
    [
        (range(8), []),
        (range(32), [(1.0, 8)]),  # four nodes of one block
        (range(0, 64), [(1.0, 8), (2.0, 32)]),  # two blocks
        (range(16, 48), [(1.0, 8), (2.0, 16)]),  # straddles two blocks
        (range(0, 512, 8), [(1.0, 1), (2.0, 4), (5.0, 16)]),  # one GPU of every node
        ([0, 256], [(1.0, 1), (2.0, 1), (5.0, 1)]),
    ],
)
def test_the_levels_that_a_group_crosses(ranks: Any, levels: list[tuple[float, int]]) -> None:
    assert reach(TALL, ranks).levels == tuple(Crossing(*level) for level in levels)


def test_the_short_form_is_one_level() -> None:
    narrow = load_cluster({"node": "dgx-h100", "nodes": 4, "fabric": {"oversubscription": 3}})
    assert reach(narrow, range(32)).levels == (Crossing(3.0, 8),)
    assert narrow.pattern == 8 and TALL.pattern == 16 * 8


@pytest.mark.parametrize(
    ("node", "ranks", "rails"),
    [
        (
            "mi300x-8",
            range(16),
            2.0,
        ),  # an all-to-all of two nodes crosses rails, and no switch takes it to the right one
        ("mi300x-8", [0, 8], 1.0),  # the same place in both nodes: one rail
        ("mi300x-8", [0, 9], 2.0),
        ("dgx-h100", range(16), 1.0),  # NVLink takes it to the right GPU first
        ("dgx-h100", [0, 9], 1.0),
        ("p5", [0, 9], 1.0),  # no rails at all
    ],
)
def test_traffic_across_rails(node: str, ranks: Any, rails: float) -> None:
    cluster = load_cluster({"node": node, "nodes": 8, "fabric": {"levels": [{"nodes": 4}, {"oversubscription": 2}]}})
    assert reach(cluster, ranks).rails == rails


def between(latency: str = "10 ms", rate: str = "10 GB/s") -> dict[str, Any]:
    """A link between two regions."""
    stated = {"kind": "assumed", "source": "a test"}
    return {
        "name": "line",
        "family": "wan",
        "rate": {"value": rate, "direction": "one", **stated},
        "links": {"value": 1, **stated},
        "latency": {"value": latency, **stated},
        "payload": {"value": 1, **stated},
    }


def regions(*blocks: int, links: int = 1, node: str = "dgx-a100") -> Any:
    """Blocks of nodes joined by links, equal ones in the short form."""
    below = {"nodes": blocks[0]} if len(set(blocks)) == 1 else {"blocks": list(blocks)}
    fabric = {"levels": [below, {"link": between(), "links": links}]}
    return load_cluster({"node": node, "nodes": sum(blocks), "fabric": fabric})


PORTS = 8 * 25e9 * 0.96
"""Payload rate of the ports of a DGX A100 [bytes/s]."""


def test_a_link_joins_blocks_of_nodes() -> None:
    cluster = regions(4, 4)
    assert reach(cluster, range(32)).levels == (Crossing(1.0, 8),), "one region"
    leaf, far = reach(cluster, range(64)).levels
    assert leaf == Crossing(1.0, 8) and far == Crossing(4 * PORTS / 10e9, 32, 2, 0.01)
    assert cluster.pattern == 32 and str(cluster).endswith("(nvlink3, infiniband-hdr, line)")
    part = load_cluster({"node": "dgx-a100", "nodes": 2, "gpus": 12, "fabric": {"levels": [{"link": between()}]}})
    assert reach(part, range(9)).levels[0].link_ratio == 1, "half of a node has the whole link"
    single = load_cluster({"node": "dgx-a100", "nodes": 3, "fabric": {"levels": [{"link": between()}]}})
    assert reach(single, range(24)).levels == (Crossing(PORTS / 10e9, 8, 3, 0.01),), "every node is a region"


def test_blocks_of_different_sizes() -> None:
    cluster = regions(2, 6)
    assert cluster.pattern == 64, "places do not repeat"
    assert [len(cluster.find_block(cluster.fabric.levels[0], rank)) for rank in (0, 15, 16, 63)] == [16, 16, 48, 48]
    one = reach(cluster, [8, 16])  # two neighbours in different regions: all 48 GPUs of one share its link
    assert one.levels[1] == Crossing(6 * PORTS / 10e9, 1, 2, 0.01)
    assert reach(cluster, range(16, 64)).levels == (Crossing(1.0, 8),)
    even = reach(cluster, range(0, 64, 8)).levels[1]
    assert even.oversubscription / even.fewest == pytest.approx(PORTS / 10e9), "each region has its share of members"


def test_rings_leave_a_block_from_one_node() -> None:
    one, four = (reach(regions(4, 4, links=links), range(64)).levels[1] for links in (1, 4))
    assert four.oversubscription == one.oversubscription and (one.link_ratio, four.link_ratio) == (1.0, 4.0)
    one, four = (reach(regions(4, 4, links=links), [0, 32]).levels[1] for links in (1, 4))
    assert four.oversubscription == one.oversubscription / 4, "groups on each of the four nodes, over a link each"


def test_messages_share_the_link_with_those_that_cross_it() -> None:
    cluster = regions(4, 4)
    all_cross = message_reach(cluster, 0, 32, lambda rank: (rank + 32) % 64, lambda rank: (rank - 32) % 64)
    assert all_cross.levels[1].oversubscription == pytest.approx(4 * PORTS / 10e9)
    shift = message_reach(cluster, 31, 32, lambda rank: (rank + 1) % 64, lambda rank: (rank - 1) % 64)
    assert shift.levels[1].oversubscription == pytest.approx(PORTS / 8 / 10e9), "of a ring one GPU sends to the other"
    near = message_reach(cluster, 0, 8, lambda rank: (rank + 8) % 64, lambda rank: (rank - 8) % 64)
    assert near.levels == (Crossing(1.0, 1),)
    many = regions(4, 4, links=4)
    spread = message_reach(many, 0, 32, lambda rank: (rank + 32) % 64, lambda rank: (rank - 32) % 64)
    assert spread.levels[1].oversubscription == pytest.approx(PORTS / 10e9), "the messages of a node have its link"


def test_blocks_hold_whole_domains() -> None:
    fabric = {"levels": [{"nodes": 4}, {}]}
    with pytest.raises(CatalogError, match=r"divides a scale-up domain of 72 GPUs\. Write multiples of 18 nodes"):
        load_cluster({"node": "gb200-nvl72", "nodes": 36, "fabric": fabric})
    fabric = {"levels": [{"nodes": 18}, {"oversubscription": 2}]}
    racks = load_cluster({"node": "gb200-nvl72", "nodes": 36, "fabric": fabric})
    assert reach(racks, range(72)).levels == ()


@pytest.mark.parametrize(
    ("chips", "axes", "shape"), [(64, 3, [4, 4, 4]), (1024, 2, [32, 32]), (96, 3, [6, 4, 4]), (1, 2, [1, 1])]
)
def test_a_slice_of_a_torus_is_nearly_a_square_or_a_cube(chips: int, axes: int, shape: list[int]) -> None:
    assert torus_shape(chips, axes) == shape
