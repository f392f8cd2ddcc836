"""Names and arguments of kernels in traces, as torch's profiler (Kineto) writes them.

Tools go by the names: HolisticTraceAnalysis counts ``^nccl.*Kernel`` as communication, ``^Memcpy`` and ``^Memset`` as
memory and all else as computation; `validation.traces.kernel_classes` finds the class of a kernel. So a kernel is named
after what it computes, with the op in brackets: ``gemm(attn_qkv)``, ``ncclDevKernel_AllReduce(attn_proj)``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from meshcast.simulator.ir.ops import (
    COMPUTE,
    Attention,
    Collective,
    Exchange,
    Gemm,
    HostCopy,
    HostLaunch,
    HostUpdate,
    Memory,
    Op,
    Transfer,
    Work,
)
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.categories import kind_of

NCCL = {
    "all_reduce": ("AllReduce", "allreduce"),
    "all_gather": ("AllGather", "_allgather_base"),
    "reduce_scatter": ("ReduceScatter", "_reduce_scatter_base"),
    "all_to_all": ("SendRecv", "all_to_all"),
    "broadcast": ("Broadcast", "broadcast"),
    "reduce": ("Reduce", "reduce"),
    "shift": ("SendRecv", "send_recv"),
    "push_pull": ("SendRecv", "send_recv"),
}
"""By operation of a collective: the name of NCCL's kernel, and torch's ``Collective name``."""

DESCRIPTIONS = {
    "tensor": "TENSOR_MODEL_PARALLEL_GROUP",
    "data": "DATA_PARALLEL_GROUP",
    "pipeline": "PIPELINE_MODEL_PARALLEL_GROUP",
    "sequence": "CONTEXT_PARALLEL_GROUP",
    "expert": "EXPERT_MODEL_PARALLEL_GROUP",
}
"""Descriptions of process groups by family of schemes, as Megatron-Core (parallel_state.py) registers them."""

LISTED_RANKS = 30
"""Ranks that Kineto lists of a group; of a larger group the first and the last."""

LAUNCH, COPY = "cudaLaunchKernel", "cudaMemcpyAsync"
"""Names of launches."""

UPDATE = "O"
"""Name of the optimizer's action."""


def name_kernel(op: Op, name: str = "") -> str:
    """Returns the name of an op's event. name: in brackets, in place of the op's."""
    work = op.work
    if isinstance(work, HostCopy):
        return "Memcpy HtoD (Pinned -> Device)" if work.back else "Memcpy DtoH (Device -> Pinned)"
    if isinstance(work, HostUpdate | HostLaunch):
        return op.name
    assert work is not None
    return f"{function_of(work)}({name or op.name})"


def function_of(work: Work) -> str:
    """Returns the function that a kernel is named after: ``gemm``, ``rms_norm_backward``,
    ``ncclDevKernel_AllReduce``."""
    if isinstance(work, Gemm):
        return "attention_scores_gemm" if work.what == "scores" else "grouped_gemm" if work.groups else "gemm"
    if isinstance(work, Attention):
        return "flash_attention_backward" if work.backward else "flash_attention_forward"
    if isinstance(work, Collective):
        return f"ncclDevKernel_{NCCL[work.operation][0]}"
    if isinstance(work, Exchange | Transfer):
        return "ncclDevKernel_SendRecv"
    assert isinstance(work, Memory)
    return work.what.replace("-", "_") + ("_backward" if work.backward else "")


def category_of(op: Op) -> str:
    """Returns Kineto's category of an op's event."""
    if isinstance(op.work, HostUpdate | HostLaunch):
        return "cpu_op"
    return "gpu_memcpy" if isinstance(op.work, HostCopy) else "kernel"


def is_launched(op: Op) -> bool:
    """Returns whether the GPU runs the op, so that the host launches it."""
    return op.work is not None and category_of(op) != "cpu_op"


def describe_op(op: Op, latency: float) -> dict[str, Any]:
    """Returns the arguments of an op's event: what its work is, its bytes and FLOPs, the part of the breakdown it
    counts for."""
    work = op.work
    assert work is not None
    # A send has no phase: its action says whether it is forward or backward.
    args: dict[str, Any] = {} if isinstance(work, Transfer) else {"phase": op.phase}
    args |= {"kind": kind_of(op), "op": op.name, "work": type(work).__name__.lower()}
    # A group of other ranks is in the arguments of its collective.
    args |= {f.name: v for f in fields(work) if f.name != "ranks" and (v := getattr(work, f.name)) is not None}
    if hasattr(work, "bytes"):
        args["bytes"] = int(work.bytes)
    if work.flops:
        args["FLOPs"] = int(work.flops)
    if latency:
        args["latency_us"] = float(f"{latency * 1e6:.6g}")
    return args


def describe_collective(op: Op, plan: Plan, device: int, receives: bool = False) -> dict[str, Any]:
    """Arguments that torch's profiler adds to a collective or message: its name, group and sizes; {} of other work.

    plan: of the ranks of the device.
    receives: whether it is the receiving end of a message. Elements are bytes: a simulated message has a size, and no
        number format.
    """
    work = op.work
    if isinstance(work, Transfer):
        name = "recv" if receives else "send"
        sizes = (0, work.nbytes) if receives else (work.nbytes, 0)
        return _group_args(name, sizes, (work.axis,), 2, DESCRIPTIONS["pipeline"], [])
    if not isinstance(work, Collective | Exchange):
        return {}
    ranks = group_ranks(work, plan, device)
    name = NCCL[work.operation][1] if isinstance(work, Collective) else "all_to_all"
    size, share = int(work.nbytes), int(work.nbytes) // max(len(ranks), 1)
    sizes = {"_allgather_base": (share, size), "_reduce_scatter_base": (size, share)}.get(name, (size, size))
    return _group_args(name, sizes, work.axes, len(ranks), DESCRIPTIONS.get(family_of(op, plan), ""), ranks)


def family_of(op: Op, plan: Plan) -> str:
    """Returns the family of schemes that a collective serves: of its stream, or on the stream of kernels of its
    axes."""
    if op.stream != COMPUTE:
        return op.stream.partition("-")[0]
    families = {axis: scheme.use.partition("/")[0] for scheme in plan.schemes for axis in scheme.axes}
    served = {families.get(plan.ranks.axis_of(part), "") for part in getattr(op.work, "axes", ())}
    return served.pop() if len(served) == 1 else ""


def group_ranks(work: Collective | Exchange, plan: Plan, device: int) -> list[int]:
    """Returns the global ranks of the group that the first rank of a device belongs to."""
    if isinstance(work, Collective) and work.ranks is not None:
        return sorted(int(rank) for rank in work.ranks)
    members = work.members if isinstance(work, Collective) else None
    across = not (plan.pipelines or plan.stage_plans) and plan.ranks.pipeline_axis in plan.mesh.parts(work.axes)
    first = 0 if across else int(plan.ranks.of_device(device).min())  # a group over all stages has the first, too
    return [first + rank for rank in plan.mesh.ranks(work.axes, members)]


def _group_args(
    name: str, sizes: tuple[int, int], axes: tuple[str, ...], size: int, description: str, ranks: list[int]
) -> dict[str, Any]:
    group = "_".join(axes)
    return {
        "Collective name": name,
        "In msg nelems": sizes[0],
        "Out msg nelems": sizes[1],
        "Group size": size,
        "dtype": "Byte",
        "Process Group Name": group,
        **({"Process Group Description": description} if description else {}),
        **({"Process Group Ranks": _list_ranks(ranks)} if ranks else {}),
    }


def _list_ranks(ranks: list[int]) -> str:
    """
    >>> _list_ranks([0, 8, 16])
    '[0, 8, 16]'
    """
    if len(ranks) <= LISTED_RANKS:
        return str(ranks)
    return f"[{', '.join(map(str, ranks[: LISTED_RANKS - 1]))}, ..., {ranks[-1]}]"
