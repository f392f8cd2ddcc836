"""Aceso's prices of stages from a profile of operators, and its walk over them.

A stage is a range of operators with one degree of tensor and of data parallelism. Its seconds are those of all passes,
of the operators that it recomputes once more, and of its input and output over the link. Its memory is

    8 W + behind A + (A + largest recomputed segment) + max(largest reserves of both passes, W)

with W the weights (a gradient, main weights and moments of 1, 2 and 4 times as many bytes) and A its input and the
activations that it keeps, for each of `behind` micro-batches in flight behind its own. If it does not fit, kinds of
operators are recomputed one after another, those of most bytes first, of the last kind as many as needed (Liu et al.
2024; microsoft/SuperScaler, `search/aceso_cost_model.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.cores.local_search.bottleneck_walk import Shape, StageState, StageWalk

FORWARD, BACKWARD, INPUT, OUTPUT, WEIGHTS, ACTIVATIONS, RESERVED_FORWARD, RESERVED_BACKWARD = range(8)
"""Columns of a profile: seconds, then MiB."""

STATES = 8
"""Weights, gradients, main weights and moments, as often as the bytes of weights."""


class PricedStage(NamedTuple):
    """A stage: seconds of a micro-batch, of these of recomputation, memory [MiB], and what is recomputed."""

    seconds: float
    again: float
    memory: float
    recomputed: tuple[bool, ...]


class OperatorProfile:
    """A profile of operators in the order of their execution.

    names: kinds of operators. tables: by tensor parallelism and samples of a rank's micro-batch [operators, columns].
    speeds: of a link by the logarithm of a message's MiB [MiB/s]. memory: of a GPU [MiB].
    shared: of kinds whose activations are others' memory, too, the share that counts.
    whole: kinds that are never recomputed. heads: kinds at which a segment of recomputation ends.
    """

    def __init__(self, settings: Mapping[str, Any], memory: float) -> None:
        """settings: of the file of a profile."""
        begin, end, times = (int(settings["repeat"][key]) for key in ("first", "last", "times"))
        kinds = [row[0] for row in settings["operators"]]
        places = [*range(begin), *[*range(begin, end + 1)] * times, *range(end + 1, len(kinds))]
        self.names = [kinds[place] for place in places]
        scale = np.array([1e-6, 1e-6, 1, 1, 1, 1, 1, 1])
        self.tables = {
            (int(row["tp"]), int(row["samples"])): np.array(row["figures"], float)[places] * scale
            for row in settings["tables"]
        }
        self.speeds = [1000 * float(one) for one in settings["link_speeds"]]
        self.memory = memory
        shared = settings["shared_activations"]
        self.counted = np.array([float(shared.get(name, 1.0)) for name in self.names])
        self.merged = np.array([shared.get(name, 1.0) == 0.0 for name in self.names])
        self.split = np.array([name in shared and shared[name] > 0.0 for name in self.names])
        self.heads = np.array([name in settings["segment_heads"] for name in self.names])
        self.whole = {*settings["never_recomputed"], *settings["segment_heads"]}

    def price(self, stage: StageState, micro: int, behind: int) -> PricedStage:
        """The stage with as little recomputation as it needs, or with all if it does not fit."""
        table = self.tables[stage.shape.tensor, micro // stage.shape.data][stage.first : stage.stop]
        again = self._recompute(table, stage, behind)
        memory = self._memory(table, stage, behind, again)
        extra = float(table[again, FORWARD].sum())
        links = sum(self._transfer(float(one)) for one in (table[0, INPUT], table[-1, OUTPUT]))
        seconds = float(table[:, FORWARD].sum() + table[:, BACKWARD].sum()) + links + extra
        return PricedStage(seconds, extra, memory, tuple(again.tolist()))

    def _transfer(self, size: float) -> float:
        """Seconds of a message of some MiB."""
        if size <= 0:
            return 0.0
        power = int(math.log2(size))
        return size / self.speeds[min(power - (power >= 1), len(self.speeds) - 1)]

    def _memory(self, table: np.ndarray, stage: StageState, behind: int, again: np.ndarray) -> float:
        weights = float(table[:, WEIGHTS].sum())
        counted = table[:, ACTIVATIONS] * self.counted[stage.first : stage.stop]
        freed, segment = self._count_freed(table, stage, again)
        kept = float(table[0, INPUT] + counted.sum()) - freed
        reserves = [float(table[:-1, one].max(initial=0.0)) for one in (RESERVED_FORWARD, RESERVED_BACKWARD)]
        return STATES * weights + behind * kept + kept + segment + max(sum(reserves), weights)

    def _count_freed(self, table: np.ndarray, stage: StageState, again: np.ndarray) -> tuple[float, float]:
        """MiB of activations that recomputation frees, and the largest segment that a backward pass makes again."""
        pairs = again[:-1] & again[1:]
        if not pairs.any():
            return 0.0, 0.0
        own = slice(stage.first, stage.stop - 1)
        sizes = table[:-1, ACTIVATIONS] * self.counted[own]
        heads = self.heads[stage.first + 1 : stage.stop]
        freed = float(sizes[pairs & ~(heads & ~self.merged[own] & ~self.split[own])].sum())
        ends = heads | (np.arange(len(pairs)) == len(pairs) - 1)
        largest, segment = 0.0, 0.0
        for place, pair in enumerate(pairs):
            if pair:
                segment += float(sizes[place])
            if not pair or (ends[place] and not self.merged[own][place] and not self.split[own][place]):
                largest, segment = max(largest, segment), 0.0
        return freed, largest

    def _recompute(self, table: np.ndarray, stage: StageState, behind: int) -> np.ndarray:
        """What a stage recomputes, so that it just fits."""
        again = np.zeros(stage.stop - stage.first, bool)
        excess = self._memory(table, stage, behind, again) - self.memory
        groups: dict[str, list[int]] = {}
        for place in range(len(again)):
            groups.setdefault(self.names[stage.first + place], []).append(place)
        sizes = table[:, ACTIVATIONS] * (behind + 1)
        left = {name: float(sizes[own].sum()) for name, own in groups.items() if name not in self.whole}
        freed = segment = 0.0
        while excess > 0 and left:
            kind = max(left, key=lambda name: left[name])
            total, own = left.pop(kind), groups[kind]
            if total <= 0 or own[0] + 1 >= len(again):
                break
            left.pop(self.names[stage.first + own[0] + 1], None)
            if total >= excess:
                enough = np.flatnonzero(np.cumsum(sizes[own]) > excess)
                own = own[: int(enough[0]) + 1] if len(enough) else own
            for place in own:
                again[place : place + 2] = True
            now = self._count_freed(table, stage, again)
            excess += (now[1] - segment) - (now[0] - freed) * (behind + 1)
            freed, segment = now
        return again


class OperatorWalk(StageWalk):
    """Aceso's walk over the stages of a profile, with micro-batches of `micro` samples."""

    def __init__(self, profile: OperatorProfile, gpus: int, batch: int, micro: int, most: int) -> None:
        self.profile, self.micro = profile, micro
        degrees = sorted({tensor for tensor, _ in profile.tables})
        sizes = [(tensor, data) for tensor in degrees for data in range(1, gpus + 1) if micro % data == 0]
        shapes = [
            Shape(tensor * data, tensor, data)
            for tensor, data in sizes
            if tensor * data <= gpus and (tensor, micro // data) in profile.tables
        ]
        self._priced: dict[tuple[StageState, int], PricedStage] = {}
        self._again: dict[StageState, float] = {}
        super().__init__(len(profile.names), shapes, gpus, batch // micro, most)

    def price_stage(self, stage: StageState, behind: int) -> PricedStage:
        """The price of a stage before `behind` others."""
        key = stage, behind
        if key not in self._priced:
            self._priced[key] = self.profile.price(stage, self.micro, behind)
            self._again[stage] = min(self._priced[key].again, self._again.get(stage, math.inf))
        return self._priced[key]

    def choose_option(self, stage: StageState, behind: int) -> tuple[int, float, int]:
        """MiB that a stage lacks, its seconds, and the place of its shape."""
        priced = self.price_stage(stage, behind)
        lacking = math.ceil(max(0.0, priced.memory - self.profile.memory))
        return lacking, priced.seconds, [*self.shapes].index(stage.shape)

    def split_seconds(self, stage: StageState, seconds: float) -> tuple[float, float, float]:
        """Seconds of one GPU's work over the GPUs, of what smaller kernels lose, and of recomputation."""
        again = self._again.get(stage, 0.0)
        whole = self.profile.tables.get((1, self.micro))
        own = slice(stage.first, stage.stop)
        ideal = float(whole[own, :2].sum()) / stage.shape.gpus if whole is not None else seconds - again
        return ideal, max(0.0, seconds - again - ideal), again

    def layers_to_move(self, stage: StageState, behind: int, step: int, wanted: float) -> int:
        """The fewest operators without which a stage fits and takes no longer than wanted, by bisection: both shrink
        with the stage, or nearly so."""
        most = stage.stop - stage.first - 1
        if most < 1:
            return 0

        def is_enough(count: int) -> bool:
            left = stage._replace(stop=stage.stop - count) if step > 0 else stage._replace(first=stage.first + count)
            lacking, seconds, _ = self.choose_option(left, behind)
            return lacking == 0 and seconds <= wanted

        low, high = 1, most
        if not is_enough(high):
            return 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
        return low


def walk_profile(
    profile: OperatorProfile, gpus: int, batch: int, sizes: Sequence[int], most: int
) -> tuple[OperatorWalk, tuple[StageState, ...]] | None:
    """The walk of the best plan over all sizes of micro-batches, and the plan; None if nothing fits."""
    best: tuple[OperatorWalk, tuple[StageState, ...]] | None = None
    for micro in sizes:
        walk = OperatorWalk(profile, gpus, batch, micro, most)
        found = walk.run()
        if found is None:
            continue
        shapes = [*walk.shapes]
        state = tuple(StageState(one.layers.start, one.layers.stop, shapes[one.option]) for one in found.stages)
        if best is None or found.value < best[0].price(best[1]).value:
            best = walk, state
    return best
