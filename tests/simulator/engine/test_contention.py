"""Ops that share links and multiprocessors: cases worked out by hand, prices, and faster links."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load_cluster
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.estimate import ALONE, FULL, Use
from meshcast.simulator.engine import contention
from meshcast.simulator.engine.contention import MIN_SHARE
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Gemm, Memory, Op, Transfer, Work
from meshcast.simulator.program.flatten import FlatProgram
from tests.simulator.engine.links import NETWORK, UP
from tests.strategies import examples

# ------------------------------------------------------------------------------------- cases by hand


def play(*ops: dict[str, Any]) -> list[float]:
    """Returns when ops of 10 s end: collectives and messages on streams of their own, kernels of a device in turn.

    An op has `seconds`, a `device`, ops that it waits for (`after`), and is a kernel with its use (`kernel`), a message
    to a device (`to`), or a collective. These have `links`, seconds in which their bytes are `moving` (all if not
    given), the multiprocessors that they keep (`kept`), and a `priority`; or a `use`.
    """
    flat, uses = FlatProgram(), dict[Work, Use]()
    for number, op in enumerate(ops):
        seconds, device, target = op.get("seconds", 10.0), op.get("device", 0), op.get("to")
        use = Use(op.get("moving", seconds), op.get("links", NETWORK), op.get("kept", 0.0))
        work: Work = Collective("all_reduce", number + 1, ("x",))
        if target is not None:
            work = Transfer(number + 1, "pp", device, target)
            flat.sent.append((number, device, target))
        elif "kernel" in op:
            work, use = Gemm(number + 1, 1, 1), op["kernel"]
        uses[work] = op.get("use", use)
        stream = op.get("stream", COMPUTE if "kernel" in op else f"data-{number}")
        flat.add(
            Op("op", stream, work, priority=op.get("priority", 0)), seconds, 0, 0, tuple(op.get("after", ())), device
        )
    devices = 1 + max([*flat.device, *(receiver for _, _, receiver in flat.sent)])
    return contention.play(flat, [uses.__getitem__] * devices).end


def part(share: float) -> dict[str, Any]:
    return {"links": (0.0, 0.0, share)}


ALL, HALF, KERNEL, BOUND_BY_MEMORY = {}, part(0.5), {"kernel": FULL}, {"kernel": ALONE}
FILLS_ITS_SENDER = {"to": 1, "use": Use(10.0, (0.0, 0.0, 1.0), 0.0, (0.0, 0.0, 0.1))}
"""A message that takes a tenth of the receiver's port."""

CASES: dict[str, tuple[list[dict[str, Any]], list[float]]] = {
    "one port, twice as long": ([ALL, ALL], [20, 20]),
    # Rates 0.4, 0.8, 1 until 10; then 0.5 and 1, with 6 and 2 left, until 12; then the first has 5 left.
    "different shares": ([part(1.0), HALF, part(0.2)], [17, 12, 10]),
    # Two halve the network, the second of them needs a quarter of the scale-up links then.
    "held back elsewhere": ([{"links": UP}, {"links": (0.5, 0.0, 1.0)}, ALL], [10 / 0.75, 20, 20]),
    "latency is not slowed": ([{"moving": 4.0}] * 2, [14, 14]),
    # Until 6 the second moves alone; both at half rate until 10, when it is done and the first has 2 left.
    "one waits for its latency": ([{"moving": 4.0}, {"seconds": 8.0}], [12, 10]),
    "other links or devices": ([ALL, {"links": UP}, {"device": 1}], [10, 10, 10]),
    "higher priority": ([ALL, {"priority": 1}], [20, 10]),
    # It takes half a port: two others get a quarter each, which is half their rate at half a port.
    "leaves half": ([HALF, HALF, HALF | {"priority": 1}], [15, 15, 10]),
    "interrupts one under way": ([ALL, KERNEL | {"seconds": 5.0}, {"priority": 1, "after": [1]}], [20, 5, 15]),
    # From 5 to 15 both at half rate, then the second has 5 left.
    "a later one slows the rest": ([ALL, KERNEL | {"seconds": 5.0}, {"after": [1]}], [15, 5, 20]),
    "opposite directions": ([{"to": 1}, {"to": 0, "device": 1}], [10, 10]),
    "out of one port": ([{"to": 1}, {"to": 2}], [20, 20]),
    "into one port": ([{"to": 2}, {"to": 2, "device": 1}], [20, 20]),
    "a collective and a message into its device": ([{"device": 1}, {"to": 1}], [20, 20]),
    # The port of device 0 is shared by two, so that device 1's has more room for the collective there.
    "a chain of links": ([{"to": 2}, {"to": 1}, part(0.8) | {"device": 1}], [20, 20, 16]),
    "a busy sender": ([FILLS_ITS_SENDER, {"seconds": 7.0}], [17, 14]),
    "a receiver that is not": ([FILLS_ITS_SENDER, part(0.9) | {"device": 1}], [10, 10]),
    # Three quarters for 5 s, then all: 10 = 3.75 + 6.25. The collective takes as long as alone.
    "kernels have what is left": ([KERNEL, {"seconds": 5.0, "kept": 0.25}], [11.25, 5]),
    # Half until 4, three quarters until 8, with 5 left; also while nothing moves.
    "several keep multiprocessors": (
        [KERNEL, {"seconds": 4.0, "links": UP, "moving": 1.0, "kept": 0.25}, {"seconds": 8.0, "kept": 0.25}],
        [13, 4, 8],
    ),
    "bound by memory, or elsewhere": (
        [BOUND_BY_MEMORY, {"seconds": 5.0, "kept": 0.25}, KERNEL | {"device": 1}],
        [10, 5, 10],
    ),
    "never at a standstill": (
        [KERNEL | {"seconds": 1.0}, *[part(0.1) | {"seconds": 1000.0, "kept": 0.25}] * 5],
        [1 / MIN_SHARE, *[1000] * 5],
    ),
    "slow from the start": (
        [BOUND_BY_MEMORY | {"seconds": 2.0}, {"kept": 0.5}, KERNEL | {"seconds": 3.0, "after": [0]}],
        [2, 10, 8],
    ),
    # 2 s at a rate of 0.8, then the remaining 0.4; a third device is not slowed.
    "multiprocessors of both ends": (
        [{"seconds": 2.0, "to": 1, "kept": 0.2}, *(KERNEL | {"seconds": 2.0, "device": n} for n in range(3))],
        [2, 2.4, 2.4, 2],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_by_hand(name: str) -> None:
    ops, ends = CASES[name]
    assert play(*ops) == pytest.approx(ends)


@examples(100)
@given(
    flows=st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 2), st.floats(0.1, 5), st.floats(0.01, 1.0)), min_size=1, max_size=6
    ),
    faster=st.floats(1.0, 20.0),
)
def test_a_faster_link_makes_no_flow_later(flows: list[tuple[float, float, float, float]], faster: float) -> None:
    """Flows that come, wait and move, all held back by something else at their shares of the link."""
    ends = []
    for factor in (1.0, faster):
        ops: list[dict[str, Any]] = []
        for came, latency, moving, share in flows:
            flow = part(share / factor) | {"seconds": latency + moving, "moving": moving, "after": [len(ops)]}
            ops += [{"seconds": came, "kernel": ALONE, "stream": f"wait-{len(ops)}"}, flow]
        ends.append(play(*ops))
    assert all(late <= early * (1 + 1e-9) for early, late in zip(*ends, strict=True))


# ------------------------------------------------------------------------------------------- prices

MESH = Mesh({"pp": 2, "dp": 4, "tp": 8})
H100 = load_cluster("dgx-h100:8")


def test_resources_of_a_collective() -> None:
    """NVLink alone inside a node; between nodes the port, which each of the eight groups of a node has for itself."""
    costs, big = Costs(H100, MESH), 2**30
    uses = {axes: costs.use(Collective("all_gather", big, axes)) for axes in (("tp",), ("dp",), ("dp", "tp"))}
    inside, between, both = (use.links for use in uses.values())
    assert inside == UP and between == NETWORK and max(both) == 1 and both[0] > 0 and both[2] > 0
    for axes, use in uses.items():
        seconds = costs.estimate(Collective("all_gather", big, axes)).seconds
        assert 0.8 * seconds < use.moving < seconds
        assert use.multiprocessors == pytest.approx(24 / 132)
    small = Collective("all_reduce", 4096, ("tp",))
    assert costs.use(small).moving < 0.1 * costs.estimate(small).seconds, "mostly latency"


def test_the_groups_of_a_stage_that_share_the_ports_of_a_node_are_in_the_price_alone() -> None:
    """Eight groups over dp, one rank a node each, move for 16 times as long over one port as over 16 for all."""
    node, moving = H100.node, []
    assert node.nics is not None
    for count in (1, 16):
        ports = node.model_copy(update={"nics": node.nics.model_copy(update={"count": count})})
        use = Costs(H100.model_copy(update={"node": ports}), MESH).use(Collective("all_gather", 2**32, ("dp",)))
        assert use.links == NETWORK
        moving.append(use.moving)
    assert moving[0] == pytest.approx(16 * moving[1], rel=1e-9)


def test_resources_of_messages_and_kernels() -> None:
    costs = Costs(H100, MESH)
    far, nowhere = Transfer(2**24, "pp", 0, 1), Transfer(2**24, "pp", 1, 1)
    # NCCL takes a channel for every 14 GB/s of a port of 50.
    assert costs.use(far) == Use(costs.estimate(far).seconds, NETWORK, 4 / 132)
    assert costs.use(nowhere) == ALONE and costs.estimate(nowhere) == (0, 0, 0)
    assert costs.use(Gemm(1024, 1024, 1024)) == costs.use(Attention(1, 512, 512, 8, 8, 64, 64)) == FULL
    assert costs.use(Memory("norm", 4096, 4096)) == ALONE


@pytest.mark.parametrize("cluster", ["dgx-h100:8", "dgx-a100:8", "gb200-nvl72:18", "mi300x-8:8", "l40s-4:16"])
def test_bytes_never_move_longer_than_the_collective_lasts(cluster: str) -> None:
    costs = Costs(load_cluster(cluster), Mesh({"dp": 8, "tp": 8}))
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
        for axes in (("tp",), ("dp",), ("dp", "tp")):
            for nbytes in (1, 2**12, 2**20, 2**30):
                work = Collective(operation, nbytes, axes)
                use = costs.use(work)
                assert 0 < use.moving <= costs.estimate(work).seconds
                assert 0 < max(use.links) <= 1 and min(use.links) >= 0
