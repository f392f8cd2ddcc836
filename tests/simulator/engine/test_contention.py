"""Ops that share links and multiprocessors: cases worked out by hand, prices, and faster links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.hardware import load_cluster
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.estimate import ALONE, FULL, Use
from meshcast.simulator.engine import contention as shared
from meshcast.simulator.engine.contention import MIN_SHARE
from meshcast.simulator.engine.longest_path import OpTimes
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import COMPUTE, Attention, Collective, Gemm, Memory, Op, Transfer, Work
from meshcast.simulator.program.flatten import FlatProgram
from tests.simulator.engine.links import NETWORK, UP
from tests.strategies import examples

# ------------------------------------------------------------------------------------- cases by hand


class Case:
    """A handful of ops, each with the resources that it occupies."""

    def __init__(self) -> None:
        self.flat = FlatProgram()
        self.uses: dict[Work, Use] = {}

    def add(self, work: Work, stream: str, seconds: float, use: Use, after: Sequence[int] = (), device: int = 0) -> int:
        self.uses[work] = use
        number = self.flat.add(Op("op", stream, work), seconds, 0.0, 0.0, tuple(after), device)
        if isinstance(work, Transfer):
            self.flat.sent.append((number, device, work.target))
        return number

    def collective(self, seconds: float, links: tuple[float, float, float] = NETWORK, **more: Any) -> int:
        """On a stream of its own. moving: seconds in which bytes move, all if not given. kept: multiprocessors.
        priority: above 0 for one that goes before others."""
        number = len(self.flat.ops)
        use, priority = Use(more.pop("moving", seconds), links, more.pop("kept", 0.0)), more.pop("priority", 0)
        self.add(Collective("all_reduce", number + 1, ("x",)), f"data-{number}", seconds, use, **more)
        self.flat.ops[number].priority = priority
        return number

    def message(self, source: int, target: int, seconds: float = 10.0) -> int:
        number = len(self.flat.ops)
        work = Transfer(number + 1, "pp", source, target)
        return self.add(work, f"pipeline-{number}", seconds, Use(seconds, NETWORK), device=source)

    def kernel(self, seconds: float, use: Use = FULL, after: Sequence[int] = (), device: int = 0) -> int:
        return self.add(Gemm(len(self.flat.ops) + 1, 1, 1), COMPUTE, seconds, use, after, device)

    def play(self) -> OpTimes:
        devices = 1 + max([*self.flat.device, *(receiver for _, _, receiver in self.flat.sent)])
        return shared.play(self.flat, [self.uses.__getitem__] * devices)

    @property
    def ends(self) -> list[float]:
        return self.play().end


HALF = (0.0, 0.0, 0.5)


@pytest.mark.parametrize(
    ("flows", "ends"),
    [
        pytest.param([{}, {}], [20, 20], id="one port, twice as long"),
        # Rates 0.4, 0.8, 1 until 10; then 0.5 and 1, with 6 and 2 left, until 12; then the first has 5 left.
        pytest.param([{"links": (0.0, 0.0, share)} for share in (1.0, 0.5, 0.2)], [17, 12, 10], id="different shares"),
        # Two halve the network, the second of them needs a quarter of the scale-up links then.
        pytest.param([{"links": UP}, {"links": (0.5, 0.0, 1.0)}, {}], [10 / 0.75, 20, 20], id="held back elsewhere"),
        pytest.param([{"moving": 4.0}, {"moving": 4.0}], [14, 14], id="latency is not slowed"),
        # Until 6 the second moves alone; both at half rate until 10, when it is done and the first has 2 left.
        pytest.param([{"moving": 4.0}, {"seconds": 8.0}], [12, 10], id="one waits for its latency"),
        pytest.param([{}, {"links": UP}, {"device": 1}], [10, 10, 10], id="other links or devices"),
        pytest.param([{}, {"priority": 1}], [20, 10], id="higher priority"),
        # It takes half a port: two others get a quarter each, which is half their rate at half a port.
        pytest.param(
            [{"links": HALF}, {"links": HALF}, {"links": HALF, "priority": 1}], [15, 15, 10], id="leaves half"
        ),
    ],
)
def test_collectives_by_hand(flows: list[dict[str, Any]], ends: list[float]) -> None:
    case = Case()
    for flow in flows:
        case.collective(**{"seconds": 10.0, **flow})
    assert case.ends == pytest.approx(ends)


def test_a_collective_of_higher_priority_interrupts_one_under_way() -> None:
    case = Case()
    case.collective(10.0)
    case.collective(10.0, after=[case.kernel(5.0)], priority=1)
    assert case.ends == pytest.approx([20.0, 5.0, 15.0])


def test_a_later_flow_slows_the_rest_of_the_first() -> None:
    """From 5 to 15 both at half rate, then the second has 5 left."""
    case = Case()
    case.collective(10.0)
    wait = case.kernel(5.0)
    case.collective(10.0, after=[wait])
    assert case.ends == pytest.approx([15.0, 5.0, 20.0])


def test_messages_share_each_direction_of_a_port_separately() -> None:
    opposite, out, into = Case(), Case(), Case()
    opposite.message(0, 1)
    opposite.message(1, 0)
    assert opposite.ends == [10.0, 10.0]
    out.message(0, 1)
    out.message(0, 2)
    assert out.ends == pytest.approx([20.0, 20.0])
    into.message(0, 2)
    into.message(1, 2)
    assert into.ends == pytest.approx([20.0, 20.0])


def test_a_collective_and_a_message_into_the_device_share_its_port() -> None:
    case = Case()
    case.collective(10.0, device=1)
    case.message(0, 1)
    assert case.ends == pytest.approx([20.0, 20.0])


def test_others_are_slowed_through_a_chain_of_links() -> None:
    """The port of device 0 is shared by two, so that device 1's has more room for the collective there."""
    case = Case()
    case.message(0, 2)
    case.message(0, 1)
    case.collective(10.0, (0.0, 0.0, 0.8), device=1)
    rates = [0.5, 0.5, 0.5 / 0.8]
    third = 10 / rates[2]
    assert case.ends[2] == pytest.approx(third)
    assert case.ends[:2] == pytest.approx([20.0, 20.0])


def test_kernels_have_the_multiprocessors_that_communication_leaves() -> None:
    """Three quarters for 5 s, then all: 10 = 3.75 + 6.25. The collective takes as long as alone."""
    case = Case()
    case.kernel(10.0)
    case.collective(5.0, kept=0.25)
    assert case.ends == pytest.approx([11.25, 5.0])


def test_multiprocessors_are_kept_during_the_latency_too_and_by_several_at_once() -> None:
    case = Case()
    case.kernel(10.0)
    case.collective(4.0, UP, moving=1.0, kept=0.25)
    case.collective(8.0, NETWORK, kept=0.25)
    assert case.ends == pytest.approx([4 + 4 + 10 - 4 * 0.5 - 4 * 0.75, 4.0, 8.0])


def test_kernels_bound_by_memory_are_not_slowed_and_collectives_keep_no_other_device() -> None:
    case = Case()
    case.kernel(10.0, ALONE)
    case.collective(5.0, kept=0.25)
    case.kernel(10.0, FULL, device=1)
    assert case.ends == [10.0, 5.0, 10.0]


def test_kernels_never_stand_still() -> None:
    case = Case()
    case.kernel(1.0)
    for _ in range(5):
        case.collective(1000.0, (0.0, 0.0, 0.1), kept=0.25)
    assert case.ends[0] == pytest.approx(1 / MIN_SHARE)


def test_a_kernel_that_starts_during_a_collective_is_slow_from_the_start() -> None:
    case = Case()
    first = case.kernel(2.0, ALONE)
    case.collective(10.0, kept=0.5)
    case.kernel(3.0, FULL, after=[first])
    assert case.ends == pytest.approx([2.0, 10.0, 8.0])


# ------------------------------------------------------------------------------------------- prices

MESH = Mesh({"pp": 2, "dp": 4, "tp": 8})


def test_resources_of_a_collective() -> None:
    """NVLink alone inside a node; between nodes the port, which each of the eight groups of a node has for itself."""
    costs = Costs(load_cluster("dgx-h100:8"), MESH)
    big = 2**30
    inside, between = (costs.use(Collective("all_gather", big, (axis,))) for axis in ("tp", "dp"))
    assert inside.links == UP and between.links == NETWORK
    both = costs.use(Collective("all_gather", big, ("dp", "tp")))
    assert max(both.links) == 1 and both.links[0] > 0 and both.links[2] > 0
    for axes, use in ((("tp",), inside), (("dp",), between), (("dp", "tp"), both)):
        seconds = costs.estimate(Collective("all_gather", big, axes)).seconds
        assert 0.8 * seconds < use.moving < seconds
        assert use.multiprocessors == pytest.approx(24 / 132)


def test_the_groups_of_a_stage_that_share_the_ports_of_a_node_are_in_the_price_alone() -> None:
    """Eight groups over dp, one rank a node each, move for 16 times as long over one port as over 16 for all."""
    cluster = load_cluster("dgx-h100:8")
    node = cluster.node
    assert node.nics is not None
    moving = []
    for count in (1, 16):
        ports = node.model_copy(update={"nics": node.nics.model_copy(update={"count": count})})
        costs = Costs(cluster.model_copy(update={"node": ports}), MESH)
        use = costs.use(Collective("all_gather", 2**32, ("dp",)))
        assert use.links == NETWORK
        moving.append(use.moving)
    assert moving[0] == pytest.approx(16 * moving[1], rel=1e-9)


def test_small_collectives_are_mostly_latency() -> None:
    costs = Costs(load_cluster("dgx-h100:8"), MESH)
    work = Collective("all_reduce", 4096, ("tp",))
    assert costs.use(work).moving < 0.1 * costs.estimate(work).seconds


def test_resources_of_messages_and_kernels() -> None:
    costs = Costs(load_cluster("dgx-h100:8"), MESH)
    far, nowhere = Transfer(2**24, "pp", 0, 1), Transfer(2**24, "pp", 1, 1)
    # NCCL takes a channel for every 14 GB/s of a port of 50.
    assert costs.use(far) == Use(costs.estimate(far).seconds, NETWORK, 4 / 132)
    assert costs.use(nowhere) == ALONE and costs.estimate(nowhere) == (0, 0, 0)
    assert costs.use(Gemm(1024, 1024, 1024)) == costs.use(Attention(1, 512, 512, 8, 8, 64, 64)) == FULL
    assert costs.use(Memory("norm", 4096, 4096)) == ALONE


@pytest.mark.parametrize("cluster", ["dgx-h100:8", "dgx-a100:8", "gb200-nvl72:18", "mi300x-8:8", "l40s-4:16"])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_bytes_never_move_longer_than_the_collective_lasts(cluster: str, operation: str) -> None:
    costs = Costs(load_cluster(cluster), Mesh({"dp": 8, "tp": 8}))
    for axes in (("tp",), ("dp",), ("dp", "tp")):
        for nbytes in (1, 2**12, 2**20, 2**30):
            work = Collective(operation, nbytes, axes)
            use = costs.use(work)
            assert 0 < use.moving <= costs.estimate(work).seconds
            assert 0 < max(use.links) <= 1 and min(use.links) >= 0


# -------------------------------------------------------------------------------------- faster links


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
        case = Case()
        for came, latency, moving, share in flows:
            number = len(case.flat.ops)
            wait = case.add(Gemm(number + 1, 1, 1), f"wait-{number}", came, ALONE)
            case.collective(latency + moving, (0.0, 0.0, share / factor), moving=moving, after=[wait])
        ends.append(case.ends)
    assert all(late <= early * (1 + 1e-9) for early, late in zip(*ends, strict=True))


# ------------------------------------------------------------------------------------------- reports


def test_a_message_takes_multiprocessors_of_both_ends() -> None:
    """Kernels of the receiver slow down for as long as those of the sender do."""
    flat = FlatProgram()
    send = flat.add(Op("send", "pipeline-forward", Transfer(1, "pp", 0, 1)), 2.0, 0.0, 0.0, (), 0)
    flat.sent.append((send, 0, 1))
    kernels = [flat.add(Op("gemm", COMPUTE, Gemm(1, 1, 1)), 2.0, 0.0, 0.0, (), device) for device in (0, 1, 2)]

    def use(work: Work) -> Use:
        return Use(2.0, NETWORK, 0.2) if isinstance(work, Transfer) else FULL

    times = shared.play(flat, [use] * 3)
    # 2 seconds at a rate of 0.8, then the remaining 0.4.
    assert [times.end[kernel] for kernel in kernels] == pytest.approx([2.4, 2.4, 2.0])
