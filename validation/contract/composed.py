"""Plans with one scheme of every family: a chosen one, and the defaults of the other families."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from meshcast.hardware.documents.plain_data import Fields
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.ir.scheme import FAMILIES
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule
from meshcast.validation.contract import of_pipeline
from meshcast.validation.contract.of_sequence import has_frames, kernels_for

PACKAGES = {"pipeline/tessel": "ortools"}
"""Packages that only an extra installs, by the scheme that needs them."""


def is_installed(use: str) -> bool:
    """Whether the package of an extra that a scheme needs is there; most need none."""
    return use not in PACKAGES or importlib.util.find_spec(PACKAGES[use]) is not None


def complete(use: str) -> bool:
    """Whether a scheme can run without a required option, such as the file of an order."""
    return is_installed(use) and not any(
        option.is_required() for option in find_scheme(use).Options.model_fields.values()
    )


@cache
def complete_schemes() -> tuple[str, ...]:
    """Returns all schemes without required options. Those with some (a file) are checked where that file is."""
    return tuple(use for use in scheme_names() if complete(use))


Options = Fields

AXES = {"pipeline": "pp", "data": "dp", "sequence": "cp", "tensor": "tp", "expert": "ep"}
"""Of every family, outermost first; that of the experts belongs to their view."""

DEFAULTS = {
    "pipeline": "pipeline/1f1b",
    "data": "data/zero-1",
    "sequence": "sequence/all-gather",
    "tensor": "tensor/megatron-sp",
    "expert": "expert/all-to-all",
    "memory": "memory/recompute-selective",
}


def chain_options(pipeline: str) -> Fields:
    """Options with which a schedule has a chain of stages: one branch, where it has branches."""
    return {"branches": 1} if "branches" in find_scheme(pipeline).Options.model_fields else {}


def axes_for(use: str, name: str) -> tuple[str, ...]:
    """As many axes as a scheme needs: one called `name`, or several called after it."""
    kind = find_scheme(use)
    if kind.most_axes == 0:
        return ()
    return (name,) if kind.least_axes <= 1 else tuple(f"{name}{i}" for i in range(kind.least_axes))


def chunks_for(use: str) -> int:
    """Chunks of which a schedule makes four micro-batches on two devices."""
    kind = find_scheme(use)
    if (
        issubclass(kind, Schedule)
        and not chain_options(use)
        and not of_pipeline.exists(kind, PipelineShape(2, 4, kind.directions))
    ):
        return 2
    return 1


def entries_with(
    use: str, size: int = 2, defaults: Mapping[str, str] = DEFAULTS
) -> tuple[list[Fields], dict[str, int]]:
    """The schemes of a plan with `use` in its family, all of its axes of `size`, and the mesh. A scheme without axes,
    in a family that has some, is added to the default of the family.

    defaults: scheme of each other family; a family without one is left out.
    """
    family = use.partition("/")[0]
    entries = list[Fields]()
    mesh: dict[str, int] = {}
    for name in FAMILIES:
        uses = [use] if name == family else [defaults[name]] if name in defaults else []
        if name == family and name in AXES and find_scheme(use).most_axes == 0:
            uses = [use, defaults[name]]
        for scheme in uses:
            axes = axes_for(scheme, AXES[name]) if name in AXES else ()
            more = {"chunks": chunks_for(scheme), **chain_options(scheme)} if name == "pipeline" else {}
            entries.append({"use": scheme, **({"over": list(axes)} if axes else {}), **more})
            if name != "expert":
                mesh |= dict.fromkeys(axes, size)
    order = [*AXES.values()]
    return entries, {axis: mesh[axis] for axis in sorted(mesh, key=lambda axis: order.index(axis.rstrip("0123456789")))}


MOE = {"experts": 8, "top_k": 2, "expert_ffn": 24, "shared_experts": 1, "first_dense": 1, "every": 2}


def job_with(use: str, overlap: bool = True, defaults: Mapping[str, str] = DEFAULTS, **more: Any) -> Fields:
    """Four micro-batches through two devices, with experts on four ranks.

    more: `set`, of the framework; `options`, of schemes by their names; other fields of the job.
    """
    sizes = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "vocab": 128, "seq": 32}
    kind_of_gpt = {"positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False}
    entries, mesh = entries_with(use, defaults={**DEFAULTS, **defaults})
    options = more.pop("options", {})
    gpus = math.prod(mesh.values())
    replicas = math.prod(size for axis, size in mesh.items() if axis.startswith("dp"))
    framework = {"overlap": {"dp": overlap, "pp": overlap}, "attention": kernels_for(use), **more.pop("set", {})}
    return {
        "model": {**sizes, **kind_of_gpt, **({"frames": 4} if has_frames(find_scheme(use)) else {}), "moe": MOE},
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": {"name": "megatron-core", "set": framework},
        "batch": {"global": 16 * replicas, "micro": 4},
        "plan": {
            "mesh": mesh,
            "views": {EXPERTS: {"edp": gpus // 2 // 4, "ep": 4}},
            "schemes": [{**entry, **options.get(entry["use"], {})} for entry in entries],
        },
        **more,
    }


def of_family(*families: str) -> list[str]:
    return [use for use in complete_schemes() if use.partition("/")[0] in families]


def options_of(use: str) -> Iterator[Options]:
    """No options, and each other choice of one option; of a number the choice 2."""
    kind = find_scheme(use)
    yield {}
    for name, field in kind.Options.model_fields.items():
        kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else [field.annotation]
        values: Sequence[object] = ()
        if get_origin(field.annotation) is Literal:
            values = get_args(field.annotation)
        elif bool in kinds:
            values = (True, False)
        elif int in kinds:
            values = (2,)
        for value in values:
            try:
                chosen = kind.Options(**{name: value})
            except ValidationError:
                continue
            if chosen != kind.Options():
                yield {name: value}


def with_options(*families: str) -> list[tuple[str, Options]]:
    return [(use, options) for use in of_family(*families) for options in options_of(use)]
