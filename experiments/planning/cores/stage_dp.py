"""Sequences of stages of a table that use all GPUs: Alpa's inter-operator pass and nnScaler's.

Alpa minimises the sum of the stages' seconds + (m - 1) x their maximum (Zheng et al. 2022, arXiv 2201.12023, section
5.2, equations 2-4): for a limit of the maximum the sum is a shortest path. What a stage costs once a step is no part of
the objective. Only limits that some optimum of the sum attains are solved here: the same optimum with fewer paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.partition_dp import LastPiece, PartitionDP
from meshcast.experiments.planning.stages import PlannedStage, StageSequence, StageTable


def plan_stages(
    table: StageTable,
    gpus: int,
    microbatches: int,
    per_node: int = 0,
    places: Sequence[range] = (),
) -> StageSequence | None:
    """Returns the best stages, with a bound of the objective; None if nothing fits.

    microbatches: m.
    per_node: GPUs of a node, whose borders a stage crosses only if it fills nodes; 0: stages may be anywhere.
    places: of every option the GPUs that its stages are on, such as those of its kind; empty: all.
    """
    paths = _StagePaths(table, gpus, min(table.layers, gpus), per_node=per_node, places=places)
    limits = np.unique(table.seconds[np.isfinite(table.seconds) & (table.behind >= 0)])
    # No stage of a better plan takes longer than an m-th of the value of a known plan.
    uniform = math.inf if places else _uniform_value(table, gpus, microbatches, per_node)
    least = paths.least_cost(uniform / microbatches * (1 + 1e-9)) if len(limits) else math.inf
    if not math.isfinite(least):
        return None
    best = paths.sequence(microbatches)
    # The slowest stage takes at least an even share of the work of all.
    low = int(np.searchsorted(limits, _least_work(table) / gpus * (1 - 1e-9)))
    high = int(np.searchsorted(limits, paths.slowest(best.stages)))
    while low < high and not is_over():  # the smallest limit under which stages exist
        middle = (low + high) // 2
        if math.isfinite(paths.least_cost(float(limits[middle]))):
            sequence = paths.sequence(microbatches)
            best = min(best, sequence, key=lambda stages: stages.value)
            high = int(np.searchsorted(limits, paths.slowest(sequence.stages)))
        else:
            low = middle + 1
    lowest = float(limits[low])
    bound = least + (microbatches - 1) * lowest
    # A higher limit than this cannot pay; from there on down no sum is below the sum before it.
    limit = (best.value - least) / (microbatches - 1) if microbatches > 1 else math.inf
    while limit >= lowest:
        if is_over():
            return best._replace(visited=paths.visited, bound=min(bound, best.value))
        total = paths.least_cost(limit)
        sequence = paths.sequence(microbatches)
        best = min(best, sequence, key=lambda stages: stages.value)
        if total + (microbatches - 1) * lowest >= best.value:
            break
        below = limits[limits < paths.slowest(sequence.stages)]
        limit = float(below[-1]) if len(below) else -math.inf
    return best._replace(visited=paths.visited, bound=best.value)


def _least_work(table: StageTable) -> float:
    """Returns the least sum over stages of seconds x GPUs [s]."""
    work = (np.where(table.behind >= 0, table.seconds, np.inf) * [option.gpus for option in table.options]).min(axis=2)
    least = np.zeros(table.layers + 1)
    for first in range(table.layers - 1, -1, -1):
        least[first] = (work[first, first:] + least[first + 1 :]).min()
    return float(least[0])


def _uniform_value(table: StageTable, gpus: int, microbatches: int, per_node: int = 0) -> float:
    """Returns the least objective of stages of equal options and even layers; infinite if none fits [s].

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
            seconds = [float(table.seconds[cell]) for cell in cells]
            best = min(best, sum(seconds) + (microbatches - 1) * max(seconds))
    return best


def balance_stages(table: StageTable, gpus: int, microbatches: int, max_stages: int = 0) -> StageSequence | None:
    """Returns the stages of least (m - 1 + their number) x the slowest; None if nothing fits.

    The objective of microsoft/nnscaler, `autodist/pipeline_solver.py`. max_stages: limit of their number; 0: none.
    """
    paths = _StagePaths(table, gpus, max_stages or min(table.layers, gpus), np.maximum)
    paths.least_cost(math.inf)
    values = [(microbatches - 1 + number) * cost for number, cost in enumerate(paths.costs, 1)]
    best = min(values)
    if not math.isfinite(best):
        return None
    return StageSequence(paths.stages(values.index(best) + 1), best, paths.visited)


class StageGroup(NamedTuple):
    """Options of as many GPUs, on the same places.

    gpus: of a stage.
    numbers: of the options.
    seconds: of their stages, by end (row) and begin (column) [options, layers + 1, layers + 1].
    behind: the most stages that may follow.
    allowed: of how many GPUs those that follow may be.
    """

    gpus: int
    numbers: list[int]
    seconds: np.ndarray
    behind: np.ndarray
    allowed: np.ndarray

    def fitting_seconds(self, behind: int, limit: float) -> np.ndarray:
        """Returns the seconds of stages that so many follow, infinite above a limit."""
        return np.where((self.behind >= behind) & (self.seconds <= limit), self.seconds, np.inf)


class _StagePaths:
    """Chains of stages from the last to the first: the state is the first layer, the GPUs are counted.

    most: limit of the number of stages.
    combine: of the seconds of stages.
    per_node, places: see `plan_stages`.
    costs: the least costs of 1, 2 ... stages under the last limit [s].
    """

    def __init__(
        self,
        table: StageTable,
        gpus: int,
        most: int,
        combine: np.ufunc = np.add,
        per_node: int = 0,
        places: Sequence[range] = (),
    ) -> None:
        self.table, self.gpus, self.most, self.combine, self.visited = table, gpus, most, combine, 0
        numbers: dict[tuple[int, range], list[int]] = {}
        for number, option in enumerate(table.options):
            if option.gpus <= gpus:
                numbers.setdefault((option.gpus, places[number] if places else range(gpus)), []).append(number)
        by_size = sorted(numbers.items(), key=lambda item: item[0][0])
        self.groups = [self._group(*key, options, per_node or gpus) for key, options in by_size]

    def _group(self, size: int, place: range, numbers: list[int], per_node: int) -> StageGroup:
        shape = (len(numbers), self.table.layers + 1, self.table.layers + 1)
        seconds, behind = np.full(shape, np.inf), np.full(shape, -1)
        seconds[:, 1:, :-1] = self.table.seconds[:, :, numbers].T
        behind[:, 1:, :-1] = self.table.behind[:, :, numbers].T
        first = np.arange(self.gpus - size, -1, -1)
        inside = first % per_node
        crosses = inside > 0 if size % per_node == 0 else inside + size > per_node
        allowed = ~crosses & (first >= place.start) & (first + size <= place.stop)
        return StageGroup(size, numbers, seconds, behind, allowed)

    def least_cost(self, limit: float) -> float:
        """Returns the least cost of stages none of which exceeds a limit [s]; infinite if there are none."""
        self.limit, self.costs = limit, list[float]()
        self.dp = PartitionDP(self._begin, self._last_stages, self.combine)
        for number in range(1, self.most + 1):
            costs = self.dp.costs(number)
            self.costs.append(float(costs[0, self.gpus]))
            if not np.isfinite(costs).any():
                break
        self.visited += self.dp.visited
        return min(self.costs)

    def _begin(self, number: int) -> np.ndarray:
        costs = np.full((self.table.layers + 1, self.gpus + 1), np.inf)
        costs[-1, 0] = np.inf if number else 0.0
        return costs

    def _last_stages(self, number: int) -> Iterator[LastPiece]:
        for place, group in enumerate(self.groups if number else []):
            seconds = group.fitting_seconds(number - 1, self.limit).min(axis=0)
            yield LastPiece(number - 1, seconds, place, group.gpus, group.allowed)

    def stages(self, number: int = 0) -> tuple[PlannedStage, ...]:
        """Returns the stages of the last least cost, by default of the best number of them."""
        number = number or self.costs.index(min(self.costs)) + 1
        stages = []
        for behind, (end, first, place) in enumerate(self.dp.trace(number, state=0)):
            group = self.groups[place]
            option = int(group.fitting_seconds(behind, self.limit)[:, end, first].argmin())
            stages.append(PlannedStage(range(first, end), group.numbers[option]))
        return tuple(reversed(stages))

    def slowest(self, stages: Sequence[PlannedStage]) -> float:
        """Returns the seconds of the slowest stage [s]."""
        return max(map(self.table.stage_seconds, stages))

    def sequence(self, microbatches: int) -> StageSequence:
        """Returns the stages of the last least cost, with the objective of so many micro-batches."""
        stages = self.stages()
        seconds = [self.table.stage_seconds(stage) for stage in stages]
        return StageSequence(stages, sum(seconds) + (microbatches - 1) * max(seconds), self.visited)
