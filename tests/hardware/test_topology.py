import pytest

from hardware import Reach, load_cluster, reach

DGX = load_cluster("dgx-h100:8")
RACK = load_cluster(
    {
        **{"gpu": "h100-sxm", "gpus": 144, "gpus_per_node": 4, "scale_up_domain": 72},
        "inter": {"kind": "infiniband", "gbps_per_gpu": 400},
    }
)
PARTS = load_cluster({"gpu": "a100-sxm-80", "gpus": 16, "gpus_per_node": 8, "scale_up_domain": 2})


@pytest.mark.parametrize(
    ("cluster", "ranks", "expected"),
    [
        (DGX, range(8, 16), Reach(8, 1, 8)),  # tp 8 in a node
        (DGX, range(4, 8), Reach(4, 1, 4)),  # tp 4: two in a node
        (DGX, range(3, 64, 8), Reach(8, 8, 1)),  # dp 8 across nodes, one rank in each
        (DGX, range(0, 64, 4), Reach(16, 8, 2)),  # dp 16, two ranks in a node
        (DGX, range(6, 10), Reach(4, 2, 2)),  # straddles two nodes
        (DGX, range(5, 17), Reach(12, 3, 1)),  # 3 + 8 + 1
        (DGX, [63], Reach(1, 1, 1)),
        (RACK, range(8), Reach(8, 1, 8)),  # two trays, one NVLink domain
        (RACK, range(72), Reach(72, 1, 72)),
        (RACK, range(0, 144, 72), Reach(2, 2, 1)),
        (PARTS, range(8), Reach(8, 4, 2)),  # bridged pairs: a node has four domains
    ],
)
def test_reach(cluster, ranks, expected) -> None:  # type: ignore[no-untyped-def]
    assert reach(cluster, ranks) == expected


@pytest.mark.parametrize("ranks", [[], [-1, 0], [0, 64]])
def test_ranks_must_exist(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="from 0 to 63"):
        reach(DGX, ranks)
