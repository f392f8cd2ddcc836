"""Dynamic programming over contiguous stages: Alpa's inter-operator pass.

Minimises, over cuts of the layers and GPUs of each stage, sum of the stages' seconds + (m - 1) x their maximum (Zheng
et al. 2022, arXiv 2201.12023, section 5.2, equations 2-4): for a limit of the maximum the sum is a shortest path. What
a stage costs once a step is no part of the objective. Only limits that some optimum of the sum attains are solved here:
the same optimum with fewer paths. `balance_stages` is nnScaler's pass, of another objective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from meshcast.experiments.planning.stages import PlannedStage, StageSequence, StageTable


def plan_stages(
    table: StageTable,
    gpus: int,
    microbatches: int,
    most_stages: int = 0,
    gap: float = 0.0,
    seconds: float = math.inf,
    per_node: int = 0,
    places: Sequence[range] = (),
) -> StageSequence | None:
    """The best stages that use all `gpus`, one behind the other, with a bound of the objective; None if nothing fits.

    seconds: CPU time after which the best stages so far count [s].
    microbatches: m. most_stages: limit of their number; 0: none.
    gap: limits of the maximum closer than this are not told apart [s]; Alpa's code has 1e-6. 0: the optimum.
    per_node: GPUs of a node, whose borders a stage crosses only if it fills nodes; 0: stages may be anywhere.
    places: of every option the GPUs that its stages are on, such as those of its kind; empty: all.
    """
    steps = _StageSteps(table, gpus, most_stages or min(table.layers, gpus), per_node=per_node, places=places)
    limits = np.unique(table.seconds[np.isfinite(table.seconds) & (table.behind >= 0)])
    end = time.process_time() + seconds
    # No stage of a better plan takes longer than m of it, one after another, may.
    equal = math.inf if places else value_alike(table, gpus, microbatches, per_node)
    limit = equal / microbatches * (1 + 1e-9)
    least = steps.least_sum(limit) if len(limits) else math.inf
    if not math.isfinite(least):
        return None
    best = steps.sequence(microbatches)
    # The slowest stage takes at least an even share of the work of all.
    low = int(np.searchsorted(limits, _least_work(table) / gpus * (1 - 1e-9)))
    high = int(np.searchsorted(limits, steps.slowest(best.stages)))
    while low < high and time.process_time() < end:  # the smallest limit under which stages exist
        middle = (low + high) // 2
        if math.isfinite(steps.least_sum(float(limits[middle]))):
            found = steps.sequence(microbatches)
            best = min(best, found, key=lambda one: one.value)
            high = int(np.searchsorted(limits, steps.slowest(found.stages)))
        else:
            low = middle + 1
    lowest = float(limits[low])
    bound = least + (microbatches - 1) * lowest
    # A higher limit than this cannot pay; from there on down every sum is at least the one before it.
    limit = (best.value - least) / (microbatches - 1) if microbatches > 1 else math.inf
    while limit >= lowest:
        if time.process_time() >= end:
            return best._replace(visited=steps.visited, bound=min(bound, best.value))
        total = steps.least_sum(limit)
        found = steps.sequence(microbatches)
        best = min(best, found, key=lambda one: one.value)
        if total + (microbatches - 1) * lowest >= best.value:
            break
        below = limits[limits < steps.slowest(found.stages) - gap]
        limit = float(below[-1]) if len(below) else -math.inf
    return best._replace(visited=steps.visited, bound=best.value)


def _least_work(table: StageTable) -> float:
    """The least sum over stages of seconds x GPUs [s]."""
    work = (np.where(table.behind >= 0, table.seconds, np.inf) * [one.gpus for one in table.options]).min(axis=2)
    least = np.zeros(table.layers + 1)
    for first in range(table.layers - 1, -1, -1):
        least[first] = (work[first, first:] + least[first + 1 :]).min()
    return float(least[0])


def value_alike(table: StageTable, gpus: int, microbatches: int, per_node: int = 0) -> float:
    """The least objective of plans whose stages have one option and even layers; infinite if none fits [s].

    per_node: see `plan_stages`.
    """
    best = math.inf
    for number, option in enumerate(table.options):
        depth, left = divmod(gpus, option.gpus)
        crosses = per_node and per_node % option.gpus and option.gpus % per_node
        if left or crosses or not 0 < depth <= table.layers:
            continue
        borders = [0, *np.cumsum([len(part) for part in np.array_split(np.arange(table.layers), depth)]).tolist()]
        cells = [(first, end - 1, number) for first, end in pairwise(borders)]
        if all(table.behind[cell] >= depth - 1 - place for place, cell in enumerate(cells)):
            own = [float(table.seconds[cell]) for cell in cells]
            best = min(best, sum(own) + (microbatches - 1) * max(own))
    return best


def balance_stages(table: StageTable, gpus: int, microbatches: int, most_stages: int = 0) -> StageSequence | None:
    """The stages of least (m - 1 + their number) x the slowest that use all `gpus`; None if nothing fits.

    The objective of microsoft/nnscaler, `autodist/pipeline_solver.py`. most_stages: limit of their number; 0: none.
    """
    steps = _StageSteps(table, gpus, most_stages or min(table.layers, gpus), np.maximum)
    steps.least_sum(math.inf)
    values = [(microbatches - 1 + number) * steps.value(number) for number in range(1, steps.most + 1)]
    best = min(values)
    if not math.isfinite(best):
        return None
    return StageSequence(steps.stages(values.index(best) + 1), best, steps.visited)


class _StageSteps:
    """Shortest paths over (layers left, GPUs left) with at most so many stages.

    `totals[s][i, d]` is the least sum of stages that hold the layers from i on, on d GPUs, in s stages.
    join: of the seconds of a stage and of those that follow; by default their sum.
    per_node, places: see `plan_stages`.
    """

    def __init__(
        self,
        table: StageTable,
        gpus: int,
        most: int,
        join: np.ufunc = np.add,
        per_node: int = 0,
        places: Sequence[range] = (),
    ) -> None:
        self.table, self.gpus, self.most, self.join, self.visited = table, gpus, most, join, 0
        self.per_node = per_node or gpus
        numbers: dict[tuple[int, range], list[int]] = {}
        for number, option in enumerate(table.options):
            if option.gpus <= gpus:
                numbers.setdefault((option.gpus, places[number] if places else range(gpus)), []).append(number)
        # Options of the same size and places, and of how many GPUs that follow such a stage has no place.
        self.sizes = [
            (size, np.array(own), self._crosses(size) | self._outside(size, place))
            for (size, place), own in sorted(numbers.items(), key=lambda one: one[0][0])
        ]
        self._totals: list[np.ndarray] = []
        self._choices: list[np.ndarray] = []

    def least_sum(self, limit: float) -> float:
        """The least sum of the seconds of stages none of which exceeds a limit [s]; infinite if there are none."""
        table, layers = self.table, self.table.layers
        first = np.full((layers + 1, self.gpus + 1), np.inf)
        first[layers, 0] = 0.0
        self._totals, self._choices = [first], [np.zeros(first.shape, int)]
        allowed = np.where(table.seconds <= limit, table.seconds, np.inf)
        for stage in range(1, self.most + 1):
            before = self._totals[-1]
            total, choice = np.full(before.shape, np.inf), np.zeros(before.shape, int)
            fitting = np.where(table.behind >= stage - 1, allowed, np.inf)
            for size, numbers, forbidden in self.sizes:
                # The best option of so many GPUs [first layer, last layer]; the third axis: GPUs of what follows.
                own = fitting[:, :, numbers]
                option = own.argmin(axis=2)
                seconds = np.take_along_axis(own, option[:, :, None], axis=2)[:, :, 0]
                spans = np.flatnonzero([np.isfinite(seconds.diagonal(span)).any() for span in range(table.layers)])
                for span in spans.tolist():  # [first layer, GPUs]: this stage of span + 1 layers, and what follows it
                    own_seconds, last = seconds.diagonal(span), np.arange(span, table.layers)
                    sums = self.join(own_seconds[:, None], before[span + 1 :, : self.gpus + 1 - size])
                    sums[:, forbidden] = np.inf
                    self.visited += sums.size
                    part = total[: len(own_seconds), size:]
                    better = sums < part
                    part[better] = sums[better]
                    cell = last * len(table.options) + numbers[option.diagonal(span)]
                    choice[: len(own_seconds), size:][better] = np.broadcast_to(cell[:, None], sums.shape)[better]
            self._totals.append(total)
            self._choices.append(choice)
            if not np.isfinite(total).any():
                break
        return float(min(one[0, self.gpus] for one in self._totals[1:]))

    def _crosses(self, size: int) -> np.ndarray:
        """Where a stage of so many GPUs crosses the border of a node without filling it, by the GPUs that follow."""
        place = np.arange(self.gpus - size, -1, -1) % self.per_node
        return place > 0 if size % self.per_node == 0 else place + size > self.per_node

    def _outside(self, size: int, place: range) -> np.ndarray:
        """Where a stage of so many GPUs is not inside of a range of them, by the GPUs that follow."""
        first = np.arange(self.gpus - size, -1, -1)
        return (first < place.start) | (first + size > place.stop)

    def seconds_of(self, stage: PlannedStage) -> float:
        """The seconds of a stage [s]."""
        return float(self.table.seconds[stage.layers[0], stage.layers[-1], stage.option])

    def slowest(self, stages: Sequence[PlannedStage]) -> float:
        """The seconds of the slowest stage [s]."""
        return max(map(self.seconds_of, stages))

    def sequence(self, microbatches: int) -> StageSequence:
        """The stages of the last least sum, with the objective of so many micro-batches."""
        stages = self.stages()
        own = [self.seconds_of(one) for one in stages]
        return StageSequence(stages, sum(own) + (microbatches - 1) * max(own), self.visited)

    def value(self, number: int) -> float:
        """The last least sum of so many stages [s]."""
        return float(self._totals[number][0, self.gpus]) if number < len(self._totals) else math.inf

    def stages(self, number: int = 0) -> tuple[PlannedStage, ...]:
        """The stages of the last least sum, by default of the best number of them."""
        number = number or min(range(1, self.most + 1), key=self.value)
        found, layer, gpus = [], 0, self.gpus
        for stage in range(number, 0, -1):
            last, option = divmod(int(self._choices[stage][layer, gpus]), len(self.table.options))
            found.append(PlannedStage(range(layer, last + 1), option))
            layer, gpus = last + 1, gpus - self.table.options[option].gpus
        return tuple(found)
