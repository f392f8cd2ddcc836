"""Copies between a GPU, its host and disks: the slowest on the way decides."""

from __future__ import annotations

import pytest

from meshcast.simulator.costs.host import HostShare, copy, update
from meshcast.simulator.ir.ops import HostCopy, HostUpdate

SHARE = HostShare(link=50e9, memory=80e9, read=4e9, write=2e9, latency=1e-6, assumed=(), assumed_disks=())


@pytest.mark.parametrize(
    ("to", "back", "rate"), [("cpu", False, 50e9), ("cpu", True, 50e9), ("nvme", False, 2e9), ("nvme", True, 4e9)]
)
def test_a_copy_takes_the_rate_of_the_slowest_on_its_way(to: str, back: bool, rate: float) -> None:
    """From one size to another; what a copy takes beside its bytes is the same for all."""
    seconds = [copy(HostCopy(nbytes, back, to), SHARE).seconds for nbytes in (10**9, 3 * 10**9)]
    assert seconds[1] - seconds[0] == pytest.approx(2e9 / rate)
    assert 0 < seconds[0] - 1e9 / rate < 1e-3
    assert copy(HostCopy(0, back, to), SHARE).seconds == 0


def test_an_update_waits_for_memory_or_for_disks() -> None:
    in_memory, on_disks = HostUpdate(8 * 10**9, 4 * 10**9), HostUpdate(8 * 10**9, 4 * 10**9, 8 * 10**9, 4 * 10**9)
    assert update(on_disks, SHARE).seconds == pytest.approx(8 / 4 + 4 / 2)
    assert 12 / 80 < update(in_memory, SHARE).seconds < update(on_disks, SHARE).seconds
