"""Shared by the tests of sharded states: a small model, jobs of one data scheme, what its streams move."""

from __future__ import annotations

from typing import Any

from meshcast.simulator.ir.ops import Collective, Op
from tests.contract.played import Played

H, V, LAYERS = 64, 128, 6
LAYER = 2 * H + 12 * H * H
"""Parameters of a layer: norms, four matrices of attention, two of the MLP."""
UNITS = [V * H, *[LAYER] * LAYERS, H + V * H]
"""Of the embedding, the layers, the final norm with the output layer."""
PSI = sum(UNITS)


def job_of(
    use: str, mesh: dict[str, int], batch: int = 1, framework: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A scheme over all axes of a mesh except those that its options name, and `batch` micro-batches."""
    ranks = 1
    for size in mesh.values():
        ranks *= size
    over = [axis for axis in mesh if axis not in options.values()]
    model = {"layers": LAYERS, "hidden": H, "heads": 4, "vocab": V, "seq": 16, "positions": "rope", "norm": "rmsnorm"}
    return {
        "model": {**model, "tied": False, "qkv_bias": False},
        "cluster": {"gpu": "h100-sxm", "gpus": ranks},
        "framework": {"set": {"launch_s": 0.0, **(framework or {})}},
        "batch": {"global": ranks * batch},
        "plan": {"mesh": mesh, "schemes": [{"use": use, "over": over, **options}]},
    }


def data_ops(played: Played, stream: str = "data") -> list[tuple[int, Op]]:
    """Ops of the family's streams that begin with `stream`, in the order in which they are issued."""
    return [(n, op) for n, op in played.instances() if op.stream.startswith(stream) and op.work is not None]


def wire(played: Played, stream: str = "data") -> list[tuple[str, int]]:
    """Collectives of one stream, in the order in which they run: operation and bytes."""
    works = [played.flat.ops[n].work for n in played.flat.queues[0, stream]]
    return [(work.operation, work.nbytes) for work in works if isinstance(work, Collective)]
