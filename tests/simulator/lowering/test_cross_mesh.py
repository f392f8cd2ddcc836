"""Cross-mesh resharding: what is sent is what is received, box by box, whatever the two meshes are."""

import random
from collections import defaultdict

import numpy as np
import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.lowering.cross_mesh import BoxGrid, most_received, reshard
from tests.draws import drawn

NBYTES = 2**20
"""Bytes of the whole tensor; divisible by all shards that are drawn."""


def draw_grid(rng: random.Random, first: int) -> BoxGrid:
    """The boxes of a stage with drawn degrees, whose residual stream sequence parallelism shards or does not."""
    mesh = Mesh({"pp": 2, **{axis: rng.choice([1, 2, 4, 8]) for axis in ("dp", "cp", "tp")}})
    layout = {"dp": "b", "cp": "s", **({"tp": "s"} if rng.random() < 0.5 else {})}
    return BoxGrid.of({axis: dim for axis, dim in layout.items() if mesh.size(axis) > 1}, mesh, "pp", first)


def intervals(grid: BoxGrid) -> dict[int, dict[str, tuple[float, float]]]:
    """The box of every rank: for each dim the interval of the dim, from 0 to 1."""
    boxes = {}
    for index, rank in np.ndenumerate(grid.ranks):
        shards = dict(zip(grid.dims, index, strict=False))
        boxes[int(rank)] = {dim: (i / grid.dims[dim], (i + 1) / grid.dims[dim]) for dim, i in shards.items()}
    return boxes


def share(one: dict[str, tuple[float, float]], other: dict[str, tuple[float, float]]) -> float:
    """Size of the intersection of two boxes, of the whole tensor."""
    size = 1.0
    for dim in {*one, *other}:
        (a, b), (c, d) = one.get(dim, (0.0, 1.0)), other.get(dim, (0.0, 1.0))
        size *= max(0.0, min(b, d) - max(a, c))
    return size


@pytest.mark.parametrize("seed", drawn(range(200), keep=20))
def test_every_receiver_gets_its_box_once(seed: int) -> None:
    """Bytes are conserved, and come from ranks that hold them: of drawn pairs of meshes."""
    rng = random.Random(seed)
    sender, receiver = draw_grid(rng, 0), draw_grid(rng, 100_000)
    messages = reshard(sender, receiver, NBYTES)
    held, wanted = intervals(sender), intervals(receiver)
    received: dict[int, float] = defaultdict(float)
    for source, target, nbytes in messages:
        received[target] += nbytes
        assert nbytes == pytest.approx(NBYTES * share(held[source], wanted[target]))
    assert received == {rank: pytest.approx(NBYTES / receiver.boxes) for rank in wanted}
    assert most_received(messages) == NBYTES // receiver.boxes


def test_messages_by_hand() -> None:
    """On equal meshes ranks that hold copies each send to the rank at their own place; eight ranks that hold the same
    box send one eighth of it each to eight replicas of the next stage; four copies that gather among themselves receive
    a quarter of the box each."""
    layout, mesh = {"dp": "b"}, Mesh({"pp": 2, "dp": 2, "tp": 4})
    sender, receiver = (BoxGrid.of(layout, mesh, "pp", first) for first in (0, 8))
    assert sender.equals(receiver)
    assert reshard(sender, receiver, 64) == tuple((rank, rank + 8, 32) for rank in range(8))
    sender = BoxGrid.of(layout, Mesh({"pp": 2, "dp": 2, "tp": 8}), "pp", 0)
    receiver = BoxGrid.of(layout, Mesh({"pp": 2, "dp": 16, "tp": 1}), "pp", 16)
    assert not sender.equals(receiver)
    sent = {(source, nbytes) for source, _, nbytes in reshard(sender, receiver, 1600)}
    assert sent == {(rank, 100) for rank in range(16)}
    sender, receiver = (
        BoxGrid.of({}, Mesh({"pp": 2, "dp": 1}), "pp", 0),
        BoxGrid.of({}, Mesh({"pp": 2, "tp": 4}), "pp", 1),
    )
    assert reshard(sender, receiver, 400, 4) == tuple((0, rank, 100) for rank in range(1, 5))
