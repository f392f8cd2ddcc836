"""Jobs with legal tables of `tensor/annotated`, drawn from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import Operator, Unit
from meshcast.simulator.ir.operators import Boundary
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.load import load_model

LAYERS = 4

GPT = {"layers": LAYERS, "hidden": 64, "heads": 8, "ffn": 128, "vocab": 64, "seq": 32, "dropout": 0.1, "tied": False}
LLAMA = {
    **{"layers": LAYERS, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 64, "vocab": 64, "seq": 32, "tied": False},
    **{"gated": True, "norm": "rmsnorm", "positions": "rope"},
}
EXPERTS = {**LLAMA, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1, "every": 2}}

MESHES = ({"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2})

Dims = dict[str, str | None]


@dataclass
class DrawnJob:
    """A job by a drawn table.

    job: in long form.
    alone: the same without schemes, on one rank.
    mesh: its axes.
    tables: what each axis shards of every operator in the layers before and from `border` on, and of its weights.
    gathered: axes along which a data scheme shards weights.
    border: the first layer with the other tables.
    """

    job: dict[str, Any]
    alone: dict[str, Any]
    mesh: dict[str, int]
    tables: list[dict[str, dict[str, Dims]]]
    gathered: tuple[str, ...]
    border: int

    def shards(self, dims: Dims, has: set[str] | None = None) -> int:
        """Ranks along the axes that shard something (one of these dims)."""
        return prod(self.mesh[axis] for axis, dim in dims.items() if dim and (has is None or dim in has))


DATA = ("", "", "data/ddp", "data/zero-1", "data/fsdp")


def draw_job(seed: int, models: Sequence[dict[str, Any]] = (GPT, LLAMA, EXPERTS), ranks: int = 0) -> DrawnJob:
    """The job of a seed: a model, a mesh, a dim or none for each axis at each operator, and weights at rest.

    ranks: of the mesh; 0: 4 or 8.
    """
    rng = Random(seed)
    model = rng.choice(models)
    mesh = rng.choice([mesh for mesh in MESHES if ranks in (0, prod(mesh.values()))])
    use = rng.choice(DATA)
    claimed = rng.choice([*mesh]) if use else ""
    replicas = mesh.get(claimed, 1)
    micro = rng.choice([1, 2, 8])
    blocks = Architecture(load_model(model), micro, GPT["seq"], GPT["vocab"], replicas)  # type: ignore[arg-type]
    units = list(blocks.units)
    border = rng.choice([0, 0, 2])
    stream = draw_dims(rng, mesh, blocks.residual, ("b", "s", "h"))
    tables = [draw_table(rng, mesh, units), draw_table(rng, mesh, [unit for unit in units if unit.name == "layer"])]
    listed = [{part: dict(entries) for part, entries in table.items()} for table in tables[: 1 + bool(border)]]
    if border:
        listed[1]["layers"] = f"{border}-{LAYERS - 1}"  # type: ignore[assignment]
        tables[1] = {part: {**tables[0][part], **entries} for part, entries in tables[1].items()}
    schemes = [{"use": "tensor/annotated", "over": [*mesh], "tables": listed, "stream": stream}]
    if use:
        schemes.insert(0, {"use": use, "over": claimed})
    samples = 2 * micro * replicas
    job = {
        "model": model,
        "cluster": {"gpu": "h100-sxm", "gpus": prod(mesh.values())},
        "framework": {"name": "megatron-core", "set": {"regather": rng.random() < 0.5}},
        "batch": {"global": samples, "micro": micro},
        "plan": {"mesh": dict(mesh), "schemes": schemes},
    }
    alone = {
        **job,
        "cluster": {"gpu": "h100-sxm", "gpus": 1},
        "batch": {"global": samples, "micro": micro * replicas},
        "plan": {"mesh": {"x": 1}, "schemes": []},
    }
    gathered = (claimed,) if use == "data/fsdp" else ()
    return DrawnJob(job, alone, mesh, tables[: 1 + bool(border)], gathered, border)


def draw_table(rng: Random, mesh: dict[str, int], units: list[Unit]) -> dict[str, dict[str, Dims]]:
    """What each axis shards at every operator, and of its weights at rest."""
    divide: dict[str, Dims] = {}
    rest: dict[str, Dims] = {}
    for operator in (one for unit in units for one in unit.operators() if not isinstance(one, Boundary)):
        dims = draw_dims(rng, mesh, operator, operator.divisible_dims)
        divide[operator.name] = dims
        if not operator.weights:
            continue
        taken = rest[operator.name] = dict.fromkeys(mesh)
        for axis, ranks in mesh.items():
            used = {dim for dim in (dims[axis],) if dim}
            free = [weight for weight in operator.weights if not used & {*weight.dims}]
            names = sorted({dim for weight in free for dim in weight.dims})
            fits = []
            for dim in names:
                shared = prod(mesh[other] for table in (dims, taken) for other, one in table.items() if one == dim)
                if all(one.dims[dim].is_divisible_by(ranks * shared) for one in free if one.has(dim)):
                    fits.append(dim)
            if fits and rng.random() < 0.3:
                taken[axis] = rng.choice(fits)
    return {"divide": divide, "rest": rest}


def draw_dims(rng: Random, mesh: dict[str, int], of: Operator | Tensor, legal: tuple[str, ...]) -> Dims:
    """A dim that divides, or none, for every axis."""
    tensors = (of,) if isinstance(of, Tensor) else (*of.ins, *of.outs, *of.weights)
    found: Dims = {}
    for axis, ranks in mesh.items():
        fits = []
        for dim in legal:
            shared = prod(mesh[other] for other, one in found.items() if one == dim)
            if all(one.dims[dim].is_divisible_by(ranks * shared) for one in tensors if one.has(dim)):
                fits.append(dim)
        found[axis] = rng.choice(fits) if fits and rng.random() < 0.85 else None
    return found
