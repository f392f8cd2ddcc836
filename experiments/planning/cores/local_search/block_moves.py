"""AutoPipe's search: from balanced stages, blocks move out of the master stage while the pipeline gets faster.

The pipeline is simulated under 1F1B. The master stage is where its critical path spends most time; a move shifts one
block from it towards another stage, and every stage in between passes one on (Liu et al. 2022, "AutoPipe", CLUSTER
2022).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.cores.stage_dp import balance_stages
from meshcast.experiments.planning.stages import PlannedStage, StageOption, StageSequence, StageTable


class PlayedPipeline(NamedTuple):
    """A simulated step: its seconds, and the seconds that its critical path spends in each stage [s]."""

    seconds: float
    critical: tuple[float, ...]

    @property
    def master(self) -> int:
        """The stage where the critical path spends most time, the last of equals."""
        return max(range(len(self.critical)), key=lambda stage: (round(self.critical[stage], 12), stage))


def play_1f1b(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> PlayedPipeline:
    """A step of stages of given seconds of both passes under 1F1B; transfers are free."""
    stages = len(forward)
    orders = [_order_passes(stages - 1 - stage, microbatches) for stage in range(stages)]
    ends: dict[tuple[int, str, int], float] = {}
    cause: dict[tuple[int, str, int], tuple[int, str, int] | None] = {}
    place = [0] * stages
    while len(ends) < 2 * stages * microbatches:
        for stage in range(stages):
            while place[stage] < len(orders[stage]):
                kind, number = orders[stage][place[stage]]
                near = stage - 1 if kind == "F" else stage + 1
                needs = [(stage, *orders[stage][place[stage] - 1])] if place[stage] else []
                needs += [(near, kind, number)] if 0 <= near < stages else []
                if any(one not in ends for one in needs):
                    break
                last = max(needs, key=ends.__getitem__, default=None)
                own = forward[stage] if kind == "F" else backward[stage]
                ends[stage, kind, number] = (ends[last] if last else 0.0) + own
                cause[stage, kind, number] = last
                place[stage] += 1
    at: tuple[int, str, int] | None = max(ends, key=ends.__getitem__)
    seconds, critical = ends[at] if at else 0.0, [0.0] * stages
    while at is not None:
        critical[at[0]] += forward[at[0]] if at[1] == "F" else backward[at[0]]
        at = cause[at]
    return PlayedPipeline(seconds, tuple(critical))


def _order_passes(warmup: int, microbatches: int) -> list[tuple[str, int]]:
    """The passes of a stage in order: `warmup` forward passes, then one of each in turn, then backward passes."""
    ahead = min(warmup, microbatches)
    steady = [one for number in range(microbatches - ahead) for one in (("F", ahead + number), ("B", number))]
    ending = [("B", number) for number in range(microbatches - ahead, microbatches)]
    return [("F", number) for number in range(ahead)] + steady + ending


def chain_table(forward: Sequence[float] | np.ndarray, backward: Sequence[float] | np.ndarray) -> StageTable:
    """The table of all stages of a chain of blocks on one GPU each, without limits of memory."""
    ends = [np.concatenate([[0.0], np.cumsum(one)]) for one in (forward, backward)]
    first, last = np.indices((len(forward), len(forward)))
    sums = [np.where(first <= last, one[last + 1] - one[first], np.inf)[:, :, None] for one in ends]
    behind = np.where(first <= last, len(forward), -1)[:, :, None]
    return StageTable((StageOption(1, {}),), sums[0] + sums[1], sums[0], 0.0 * behind, behind)


def move_blocks(table: StageTable, gpus: int, microbatches: int, end: float = math.inf) -> StageSequence | None:
    """Stages of the one option of a table that use all `gpus`, and the seconds of their simulated step; None if nothing
    fits. Starts from the least slowest stage. end: of the CPU time of the process, for moves [s]."""
    seed = balance_stages(table, gpus, microbatches)
    if seed is None:
        return None
    borders, visited = [0, *(one.layers.stop for one in seed.stages)], 0
    played = play_borders(table, borders, microbatches)
    while time.process_time() < end:
        tried = [(play_borders(table, one, microbatches), one) for one in _moves(borders, played.master)]
        visited += len(tried) + 1
        best, moved = min(tried, key=lambda one: one[0].seconds, default=(played, borders))
        if not best.seconds < played.seconds * (1 - 1e-12):
            break
        borders, played = moved, best
    stages = tuple(PlannedStage(range(*borders[place : place + 2]), 0) for place in range(len(borders) - 1))
    return StageSequence(stages, played.seconds, seed.visited + visited)


def play_borders(table: StageTable, borders: Sequence[int], microbatches: int) -> PlayedPipeline:
    """The simulated step of stages between borders, in the first option of a table; infinite if one does not fit."""
    cells = [(borders[place], borders[place + 1] - 1, 0) for place in range(len(borders) - 1)]
    if any(table.behind[cell] < len(cells) - 1 - place for place, cell in enumerate(cells)):
        return PlayedPipeline(math.inf, (0.0,) * len(cells))
    forward = [float(table.forward[cell]) for cell in cells]
    both = [float(table.seconds[cell]) for cell in cells]
    return play_1f1b(forward, [one - other for one, other in zip(both, forward, strict=True)], microbatches)


def _moves(borders: Sequence[int], master: int) -> Iterator[list[int]]:
    """The borders after one block has left a stage for each of the others."""
    for target in range(len(borders) - 1):
        moved = list(borders)
        for place in range(target + 1, master + 1):
            moved[place] += 1
        for place in range(master + 1, target + 1):
            moved[place] -= 1
        if target != master and all(one < other for one, other in pairwise(moved)):
            yield moved
