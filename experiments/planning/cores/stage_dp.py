"""Dynamic programming over contiguous stages: Alpa's inter-operator pass.

Minimises, over cuts of the layers and GPUs of each stage, sum of the stages' seconds + (m - 1) x their maximum (Zheng
et al. 2022, arXiv 2201.12023, section 5.2, equations 2-4): for a limit of the maximum the sum is a shortest path, and
limits are tried in ascending order until (m - 1) x the limit with the least sum is no better than the best plan. What a
stage costs once a step is no part of the objective. `balance_stages` is nnScaler's pass, of another objective.
"""

from __future__ import annotations

import math

import numpy as np

from experiments.planning.stages import PlannedStage, StageSequence, StageTable


def plan_stages(
    table: StageTable, gpus: int, microbatches: int, most_stages: int = 0, gap: float = 0.0, per_node: int = 0
) -> StageSequence | None:
    """The best stages that use all `gpus`, one stage behind the other; None if nothing fits.

    microbatches: m. most_stages: limit of their number; 0: none.
    gap: limits of the maximum closer than this are not told apart [s]; Alpa's code has 1e-6. 0: the optimum.
    per_node: GPUs of a node, whose borders a stage crosses only if it fills nodes; 0: stages may be anywhere.
    """
    steps = _StageSteps(table, gpus, most_stages or min(table.layers, gpus), per_node=per_node)
    limits = np.unique(table.seconds[np.isfinite(table.seconds) & (table.behind >= 0)])
    if not len(limits) or not math.isfinite(steps.least_sum(math.inf)):
        return None
    least = steps.least_sum(math.inf)
    low, high = 0, len(limits) - 1
    while low < high:  # the smallest limit under which stages exist
        middle = (low + high) // 2
        low, high = (low, middle) if math.isfinite(steps.least_sum(float(limits[middle]))) else (middle + 1, high)
    best: StageSequence | None = None
    last = -math.inf
    for limit in map(float, limits[low:]):
        if best is not None and (microbatches - 1) * limit + least >= best.value:
            break
        if limit - last < gap:
            continue
        last = limit
        steps.least_sum(limit)
        stages = steps.stages()
        own = [float(table.seconds[one.layers[0], one.layers[-1], one.option]) for one in stages]
        value = sum(own) + (microbatches - 1) * max(own)
        if best is None or value < best.value:
            best = StageSequence(stages, value, 0)
    assert best is not None
    return best._replace(visited=steps.visited)


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
    per_node: GPUs of a node, whose borders a stage crosses only if it fills nodes; 0: stages may be anywhere.
    """

    def __init__(self, table: StageTable, gpus: int, most: int, join: np.ufunc = np.add, per_node: int = 0) -> None:
        self.table, self.gpus, self.most, self.join, self.visited = table, gpus, most, join, 0
        self.per_node = per_node or gpus
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
            for number, option in enumerate(table.options):
                if option.gpus > self.gpus:
                    continue
                seconds = np.where(table.behind[:, :, number] >= stage - 1, allowed[:, :, number], np.inf)
                # [first layer, last layer, GPUs]: this stage, and what follows its last layer.
                sums = self.join(seconds[:, :, None], before[None, 1:, : self.gpus + 1 - option.gpus])
                self.visited += sums.size
                last = sums.argmin(axis=1)
                best = np.take_along_axis(sums, last[:, None], axis=1)[:, 0]
                best[:, self._crosses(option.gpus)] = np.inf
                part = total[:-1, option.gpus :]
                better = best < part
                part[better] = best[better]
                choice[:-1, option.gpus :][better] = last[better] * len(table.options) + number
            self._totals.append(total)
            self._choices.append(choice)
        return float(min(one[0, self.gpus] for one in self._totals[1:]))

    def _crosses(self, size: int) -> np.ndarray:
        """Where a stage of so many GPUs crosses the border of a node without filling it, by the GPUs left before it."""
        place = np.arange(self.gpus - size, -1, -1) % self.per_node
        return place > 0 if size % self.per_node == 0 else place + size > self.per_node

    def value(self, number: int) -> float:
        """The last least sum of so many stages [s]."""
        return float(self._totals[number][0, self.gpus])

    def stages(self, number: int = 0) -> tuple[PlannedStage, ...]:
        """The stages of the last least sum, by default of the best number of them."""
        number = number or min(range(1, self.most + 1), key=self.value)
        found, layer, gpus = [], 0, self.gpus
        for stage in range(number, 0, -1):
            last, option = divmod(int(self._choices[stage][layer, gpus]), len(self.table.options))
            found.append(PlannedStage(range(layer, last + 1), option))
            layer, gpus = last + 1, gpus - self.table.options[option].gpus
        return tuple(found)
