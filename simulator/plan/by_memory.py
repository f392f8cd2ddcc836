"""Partitions by memory: the peak of every device, profiled as a line over the layers of its stage.

`partition: by-memory` minimises the largest peak (Dreuning et al. 2022, Euro-Par, pages 155-170). Recompute schemes
that adapt to memory choose for every stage how many layers it has and how many of them are recomputed, for the shortest
step that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import AdaptsRecompute, schemes_with
from meshcast.simulator.plan.partition import LayerCosts, is_reachable, minimise_largest, minimise_step, stage_costs
from meshcast.simulator.plan.plan import Plan, replace_scheme

ROUNDS = 4
"""Most times that memory is profiled again around the last partition."""

DevicePeaks = Callable[[Plan], Sequence[float]]
"""Returns the peak memory of every device of a plan with layers [bytes]."""


class StageMemory(NamedTuple):
    """Peak memory of the device of a stage [bytes]: `fixed`, and `layer` for each of its layers."""

    fixed: float
    layer: float


def check_one_stage_a_device(plan: Plan, what: str) -> None:
    """Raises PlanError unless every device holds a part of a chain of layers, all under the same schemes."""
    parts = plan.model_parts.count, plan.shape.stages
    if parts != (plan.shape.p, plan.shape.p) or plan.stage_plans or plan.job.model.branches:
        rule = f"{what} gives every device one stage, and all stages the same degrees"
        raise PlanError("plan.partition", rule, "Use a schedule with one chunk a device, or by-cost")


def partition_by_memory(plan: Plan, peaks: DevicePeaks) -> tuple[int, ...]:
    """Returns the layers of every stage for which the fullest device is least full.

    The profile is taken at an even partition and, as long as that helps, again around the last partition.
    """
    check_one_stage_a_device(plan, "partition: by-memory")
    layers, stages = len(plan.job.model.every_layer), plan.model_parts.count
    best, least = spread_layers(layers, stages), inf
    tried = best
    for _ in range(ROUNDS):
        largest = max(peaks(replace(plan, layers=tuple(tried))))
        if largest >= least:
            break
        best, least = tried, largest
        tried = minimise_largest(memory_costs(profile_stages(plan, best, peaks), layers))
    return tuple(best)


def spread_layers(layers: int, stages: int) -> list[int]:
    """Returns the layers as evenly as they go, the first stages with one more."""
    if layers < max(stages - 2, 1):
        rule = f"with {layers} layers on {stages} stages one inside the pipeline would be without"
        raise PlanError("plan.partition", rule, f"At most {layers + 2} stages would work")
    inner = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    # Where there are fewer layers than stages, the ends have none.
    return inner if min(inner) or stages == 1 else [0, *[1] * min(layers, stages - 1), 0][:stages]


def profile_stages(plan: Plan, layers: Sequence[int], peaks: DevicePeaks) -> list[StageMemory]:
    """Returns the memory of every stage, from partitions in which neighbours have swapped a layer (incremental
    profiling)."""
    at = peaks(replace(plan, layers=tuple(layers)))
    slopes: dict[int, float] = {}
    for begin in (0, 1):
        moved = list(layers)
        for stage in range(begin, len(layers) - 1, 2):
            giver, taker = (stage, stage + 1) if layers[stage] > 1 else (stage + 1, stage)
            if moved[giver] > 1:
                moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
        if moved != list(layers):
            there = peaks(replace(plan, layers=tuple(moved)))
            slopes |= {
                i: (there[i] - at[i]) / (new - old)
                for i, (old, new) in enumerate(zip(layers, moved, strict=True))
                if new != old
            }
    mean = sum(slopes.values()) / len(slopes) if slopes else 0.0
    return [
        StageMemory(total - slopes.get(i, mean) * count, slopes.get(i, mean))
        for i, (total, count) in enumerate(zip(at, layers, strict=True))
    ]


def memory_costs(profile: Sequence[StageMemory], layers: int) -> list[np.ndarray]:
    """Returns, by stage, the peak memory with the layers from that of the row up to that of the column."""
    slopes = (LayerCosts(0.0, [stage_memory.layer] * layers, 0.0) for stage_memory in profile)
    growth = [stage_costs(slope, stage, len(profile)) for stage, slope in enumerate(slopes)]
    return [stage_memory.fixed + costs for stage_memory, costs in zip(profile, growth, strict=True)]


def adapt_recompute(
    plan: Plan,
    peaks: DevicePeaks,
    layer_costs: Callable[[Plan], Sequence[LayerCosts]],
    memory: Sequence[float],
    stated: Sequence[int] | None = None,
) -> Plan:
    """Returns the plan whose stages have layers, and recompute as many of them, as make the shortest step that fits.

    With every range of layers a stage recomputes as few as its memory asks for; a dynamic programme takes the ranges.
    Where nothing fits, all layers are recomputed.

    memory: of every device [bytes].
    stated: layers of every stage that the plan states; None: to be chosen.
    """
    (scheme,) = schemes_with(plan.schemes, AdaptsRecompute)
    check_one_stage_a_device(plan, scheme.use)
    recompute = partial(_recompute_layers, plan, scheme)
    layers, stages = len(plan.job.model.every_layer), plan.model_parts.count
    none, every = recompute([0] * stages), recompute([layers] * stages)
    kept, freed = (profile_stages(extreme, spread_layers(layers, stages), peaks) for extreme in (none, every))
    saved = [max(before.layer - after.layer, 1.0) for before, after in zip(kept, freed, strict=True)]
    needed = _needed_counts(memory_costs(kept, layers), memory, saved)
    costs = _recompute_costs(layer_costs(none), layer_costs(every), needed)
    partition = list(stated or minimise_step(costs, plan.shape.m))
    counts = [
        min(int(least[end - count, end]), count)  # all of them at most
        for least, count, end in zip(needed, partition, accumulate(partition), strict=True)
    ]

    def measure_excess(counts: Sequence[int]) -> list[float]:
        """Returns by how many layers more to recompute every stage would fit."""
        each = zip(peaks(recompute(counts, partition)), memory, saved, strict=True)
        return [(peak - limit) / nbytes for peak, limit, nbytes in each]

    return recompute(_correct_counts(counts, partition, measure_excess), partition)


def _correct_counts(
    counts: list[int], partition: Sequence[int], measure_excess: Callable[[Sequence[int]], Sequence[float]]
) -> list[int]:
    """Returns the recomputed layers of every stage with which all fit that can.

    The profile is a line, so the peaks say first by how much to correct it both ways, and then what still misses.
    """
    for least in (-sum(partition), *[0] * (2 * ROUNDS - 1)):
        wanted = [count + max(least, ceil(more)) for count, more in zip(counts, measure_excess(counts), strict=True)]
        corrected = [min(max(count, 0), layers) for count, layers in zip(wanted, partition, strict=True)]
        if corrected == counts:
            break
        counts = corrected
    return counts


def _recompute_layers(
    plan: Plan, scheme: AdaptsRecompute, counts: Sequence[int], partition: Sequence[int] = ()
) -> Plan:
    """Returns the plan whose stages recompute so many layers each. partition: layers of every stage, once known."""
    schemes = {count: scheme.recompute_layers(count) for count in counts}
    stages = [replace(replace_scheme(plan, scheme, schemes[count]), layers=tuple(partition)) for count in counts]
    return replace(stages[0], stage_plans=tuple(stages)) if len(schemes) > 1 else stages[0]


def _needed_counts(peaks: Sequence[np.ndarray], memory: Sequence[float], saved: Sequence[float]) -> list[np.ndarray]:
    """Returns by stage how many of the layers from that of the row up to that of the column have to be recomputed.

    peaks: without recomputation; saved: by each recomputed layer [bytes].
    """
    each = zip(peaks, memory, saved, strict=True)
    return [np.ceil(np.maximum(peak - limit, 0.0) / nbytes) for peak, limit, nbytes in each]


def _recompute_costs(
    plain: Sequence[LayerCosts], recomputed: Sequence[LayerCosts], needed: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns by stage the cost of the layers from that of the row up to that of the column, of which as many are
    recomputed as are needed; where nothing fits, all of them.

    plain, recomputed: by stage, costs of layers of which none or all are recomputed.
    """
    stages, layers = len(plain), np.arange(len(needed[0]))
    fast, slow = ([stage_costs(costs, i, stages) for i, costs in enumerate(each)] for each in (plain, recomputed))
    count = layers[None] - layers[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = [np.where(least <= count, least / np.maximum(count, 1), np.inf) for least in needed]
        mixed = [
            none + np.nan_to_num((every - none) * share, posinf=np.inf)
            for none, every, share in zip(fast, slow, shares, strict=True)
        ]
    return mixed if is_reachable(mixed) else slow
