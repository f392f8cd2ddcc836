"""Categories of time: the parts of the breakdown that an op counts for."""

from __future__ import annotations

from meshcast.simulator.ir.ops import COMPUTE, Attention, Gemm, Op
from meshcast.simulator.ir.scheme import SHORT

EXPOSED = ("tp", "cp", "ep", "dp", "pp", "copy")
"""Communication by axis. Where two run at once without computation beside them, the time counts for the first."""

HOST = "host"
"""Waiting for the host to issue an op."""

COMPUTING = ("gemm", "attention", "memory_bound", "optimizer")


def axis_of(op: Op) -> str:
    """Returns the axis that an op's stream serves, or `COMPUTE`, or `HOST`."""
    return axis_of_stream(op.stream)


def axis_of_stream(stream: str) -> str:
    """Returns the axis that a stream serves, or `COMPUTE`, or `HOST`."""
    return stream if stream in (COMPUTE, HOST) else SHORT[stream.partition("-")[0]]


def kind_of(op: Op) -> str:
    """Returns the part of the breakdown that an op's time counts for."""
    if op.stream != COMPUTE:
        return axis_of(op)
    if op.phase == "U":
        return "optimizer"
    if isinstance(op.work, Gemm):
        return "gemm"
    return "attention" if isinstance(op.work, Attention) else "memory_bound"


KINDS = (*COMPUTING, *EXPOSED, HOST)
