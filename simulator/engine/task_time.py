"""Duration of a task, or of a pass through every stage, alone on its device; means over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshcast.simulator.engine.longest_path import longest_path
from meshcast.simulator.ir.ops import HostCopy, StageOps, Transfer
from meshcast.simulator.program.block import CompiledBlocks, Price
from meshcast.simulator.program.flatten import FlatProgram, flatten_task
from meshcast.simulator.program.task import Task, make_task
from meshcast.simulator.scheduling.schedule import PassDurations


def task_seconds(task: Task, host: float = 0.0) -> float:
    """Returns the duration of a task on an idle device [s]."""
    flat = FlatProgram()
    for op, seconds, latency, issue, after in flatten_task(task, host).ops:
        flat.add(op, seconds, latency, issue, after, 0)
    return longest_path(flat).span


def mean_durations(every: Sequence[PassDurations], weights: Sequence[int]) -> PassDurations:
    """Means of durations: of the passes of micro-batches of different lengths, of which `weights` are the numbers."""

    def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(np.average(rows, axis=0, weights=weights).tolist())

    kept = [durations.kept_for_weights for durations in every if durations.kept_for_weights is not None]
    return PassDurations(
        mean([durations.forward for durations in every]),
        mean([durations.input_gradients for durations in every]),
        mean([durations.weight_gradients for durations in every]),
        mean([durations.recomputation for durations in every]),
        float(np.average([durations.hop for durations in every], weights=weights)),
        mean(kept) if len(kept) == len(every) else None,
        stored=mean([durations.stored for durations in every]),
        copied=mean([durations.copied for durations in every]),
    )


def pass_durations(
    stages: Sequence[StageOps],
    prices: Sequence[Price],
    axis: str,
    host: float,
    blocks: CompiledBlocks,
    copies: bool = False,
) -> PassDurations:
    """Durations of the passes through every stage at its prices, each alone on its device, and of a hop between two;
    what forward passes store is in bytes.

    axis: that of the pipeline; empty: all stages are on a single device.
    copies: with the copies of what forward passes store to host memory.
    """
    known: dict[tuple[StageOps, int, str], float] = {}
    left: dict[StageOps, float] = {}
    parts: dict[StageOps, float] = {}

    def lasts(kind: str) -> tuple[float, ...]:
        keys = [(stage_ops, prices.index(price), kind) for stage_ops, price in zip(stages, prices, strict=True)]
        for key, stage_ops, price in zip(keys, stages, prices, strict=True):
            if key not in known:
                known[key] = task_seconds(make_task(stage_ops, kind, price, blocks=blocks), host)
        return tuple(known[key] for key in keys)

    hop = sum(prices[0](Transfer(stages[0].message_nbytes, axis, 0, 1))[::2]) if axis else 0.0
    for stage_ops, price in zip(stages, prices, strict=True):
        if stage_ops not in parts:
            grown = [make_task(stage_ops, kind, price, blocks=blocks).memory.grown for kind in "FW"]
            left[stage_ops] = grown[0]
            parts[stage_ops] = -grown[1] / grown[0] if grown[0] > 0 else 0.0
    kept = tuple(parts[stage_ops] for stage_ops in stages) if any(parts.values()) else None
    stored = tuple(left[stage_ops] for stage_ops in stages)
    copied = _copy_seconds(stored, prices) if copies else ()
    return PassDurations(lasts("F"), lasts("B"), lasts("W"), lasts("R"), hop, kept, stored=stored, copied=copied)


def _copy_seconds(sizes: Sequence[float], prices: Sequence[Price]) -> tuple[float, ...]:
    """Returns the duration of a copy of so many bytes of every stage to host memory [s]."""
    works = [HostCopy(round(nbytes), activations=True) for nbytes in sizes]
    return tuple(sum(price(work)[::2]) if work.nbytes else 0.0 for work, price in zip(works, prices, strict=True))
