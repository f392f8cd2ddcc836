"""Shared by tests of schemes: small jobs, what the streams of data schemes move, and what goes to hosts."""

from __future__ import annotations

from math import prod
from typing import Any

from meshcast.simulator.ir.ops import Collective, HostCopy, Op
from meshcast.validation.contract.played import Played

H, V, LAYERS = 64, 128, 6
LAYER = 2 * H + 12 * H * H
"""Parameters of a layer: norms, four matrices of attention, two of the MLP."""
UNITS = [V * H, *[LAYER] * LAYERS, H + V * H]
"""Of the embedding, the layers, the final norm with the output layer."""
PSI = sum(UNITS)
MODEL = {"layers": LAYERS, "hidden": H, "heads": 4, "vocab": V, "seq": 16, "positions": "rope", "norm": "rmsnorm"}
GPT = {"layers": 4, "hidden": H, "heads": 4, "vocab": V, "seq": 16, "tied": False}


def job_on(mesh: dict[str, int], *schemes: Any, samples: int, model: Any = GPT, **more: Any) -> dict[str, Any]:
    """Some schemes on a mesh of H100s, and samples of a step. more: `views` of the mesh; other fields of the job."""
    plan = {"mesh": mesh, "views": more.pop("views", {}), "schemes": [*schemes]}
    return {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus": prod(mesh.values())},
        "batch": {"global": samples},
        "plan": plan,
        **more,
    }


def job_of(
    use: str, mesh: dict[str, int], batch: int = 1, framework: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """A scheme over all axes of a mesh except those that its options name, and `batch` micro-batches."""
    over = [axis for axis in mesh if axis not in options.values()]
    traits = {"set": {"launch_s": 0.0, **(framework or {})}}
    model = {**MODEL, "tied": False, "qkv_bias": False}
    samples = prod(mesh.values()) * batch
    return job_on(mesh, {"use": use, "over": over, **options}, samples=samples, model=model, framework=traits)


def data_ops(played: Played, stream: str = "data") -> list[tuple[int, Op]]:
    """Ops of the family's streams that begin with `stream`, in the order in which they are issued."""
    return [(n, op) for n, op in played.instances() if op.stream.startswith(stream) and op.work is not None]


def moved(played: Played, operation: str, device: int | None = None) -> list[int]:
    """Bytes of the collectives of one kind on the streams of the family, in the order in which they are issued."""
    works = [op.work for _, op in played.instances(device) if op.stream.startswith("data")]
    return [work.nbytes for work in works if isinstance(work, Collective) and work.operation == operation]


def copied(played: Played, back: bool, to: str | None = None) -> int:
    """Bytes over one rank's link to its host."""
    works = [op.work for _, op in played.instances() if isinstance(op.work, HostCopy)]
    return sum(work.nbytes for work in works if work.back == back and to in (None, work.to))


def wire(played: Played, stream: str = "data") -> list[tuple[str, int]]:
    """Collectives of one stream, in the order in which they run: operation and bytes."""
    works = [played.flat.ops[n].work for n in played.flat.queues[0, stream]]
    return [(work.operation, work.nbytes) for work in works if isinstance(work, Collective)]
