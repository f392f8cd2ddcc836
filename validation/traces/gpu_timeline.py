"""The timeline of a traced GPU: its kernels, copies and memsets, each on the stream of the scheme that it serves.

A collective's stream follows from its process group: from the group's description (``mesh_tp``,
``TENSOR_MODEL_PARALLEL_GROUP``), or from its ranks, which are compared with the mesh of the plan.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.kineto import ON_DEVICE, Event, Trace
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.traces.kernel_classes import COMMUNICATES, classify, collective_of
from meshcast.validation.traces.timeline import Slice, Timeline

FAMILY_PATTERNS = (
    ("expert", r"expert_model|expert_tensor|(^|_)ep(_|$)"),
    ("data", r"data|(^|_)e?dp(_|$)|fsdp|replicate|shard"),
    ("tensor", r"tensor|(^|_)tp(_|$)"),
    ("pipeline", r"pipeline|embedding|(^|_)pp(_|$)"),
    ("sequence", r"context|sequence|(^|_)cp(_|$)"),
)
"""Scheme families by the words of process group descriptions, tried in this order."""

RANKS = re.compile(r"\[\d{1,9}(?:, ?\d{1,9})*+\]", re.ASCII)
"""All ranks of a process group; torch shortens long lists by dots."""


def gpu_timeline(trace: Trace, plan: Plan, rank: int, mark: Event | None) -> Timeline:
    """Returns the timeline of the kernels that the marked step launched, from the first kernel's start to the last
    kernel's end.

    mark: the host's event that encloses the step; None: the whole trace. Of several GPUs the busiest counts.
    """
    kernels = trace.of(*ON_DEVICE)
    busiest: dict[Any, float] = defaultdict(float)
    for kernel in kernels:
        busiest[str(kernel.args.get("device"))] += kernel.seconds
    device = max(busiest, key=lambda name: busiest[name])
    kernels = [kernel for kernel in kernels if str(kernel.args.get("device")) == device]
    if mark is not None:
        launched = [(kernel, (trace.launch(kernel) or kernel).begin) for kernel in kernels]
        kernels = [kernel for kernel, moment in launched if mark.begin <= moment <= mark.end]
    if not kernels:
        raise PlanError("--step", "no kernel was launched in it", "Name another step", mark.name if mark else None)
    first = min(kernel.begin for kernel in kernels)
    slices = [_slice(trace, plan, rank, kernel, first) for kernel in kernels]
    return Timeline(tuple(slices), max(kernel.end for kernel in kernels) - first, first)


def _slice(trace: Trace, plan: Plan, rank: int, kernel: Event, start: float) -> Slice:
    """Returns a kernel as a slice of a step that starts at `start` [s]."""
    callers, begin = trace.callers(kernel), kernel.begin - start
    if not COMMUNICATES.search(kernel.name):
        return Slice(COMPUTE, classify(kernel.name, callers), begin, kernel.seconds, kernel.name)
    # NCCL runs all-to-alls in kernels called SendRecv, so torch's name of the collective comes before the kernel's.
    recorded = str(kernel.args.get("Collective name") or "")
    names = [f"nccl:{recorded}", *(caller for caller in callers if caller.startswith("nccl:")), kernel.name]
    kind = next(filter(None, map(collective_of, names)), "other")
    return Slice(stream_of(trace, plan, rank, kernel), kind, begin, kernel.seconds, kernel.name)


def stream_of(trace: Trace, plan: Plan, rank: int, kernel: Event) -> str:
    """Returns the stream of a collective, from the description of its process group or from its ranks; empty if neither
    tells."""
    description, name = (str(kernel.args.get(f"Process Group {key}") or "") for key in ("Description", "Name"))
    families = families_of(plan)
    axis = description.removeprefix("mesh_")
    if axis in families:
        return families[axis]
    if family := next((family for family, words in FAMILY_PATTERNS if re.search(words, axis, re.I)), ""):
        return family
    stated = str(kernel.args.get("Process Group Ranks") or "")
    members = tuple(map(int, stated[1:-1].split(","))) if RANKS.fullmatch(stated) else ()
    members = members or next((trace.groups[key] for key in (description, name) if key in trace.groups), ())
    return next((family for axis, family in families.items() if members == ranks_along(plan, rank, axis)), "")


def families_of(plan: Plan) -> dict[str, str]:
    """Returns the family of the scheme of each mesh axis: ``{"tp": "tensor", ...}``."""
    return {axis: scheme.use.partition("/")[0] for scheme in plan.schemes for axis in scheme.axes}


def ranks_along(plan: Plan, rank: int, axis: str) -> tuple[int, ...]:
    """Returns the ranks of the group along `axis` that `rank` belongs to."""
    mesh = plan.mesh
    strides = [mesh.stride(part) for part in mesh.parts(axis) if part in mesh.axes]
    sizes = [mesh.axes[part] for part in mesh.parts(axis) if part in mesh.axes]
    offset = sum(rank // stride % size * stride for stride, size in zip(strides, sizes, strict=True))
    return tuple(rank - offset + other for other in mesh.ranks((axis,)))
