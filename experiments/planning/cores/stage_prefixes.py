"""Search over prefixes of stages by the latency of a synchronous pipeline.

With the pivot stage Q, the latency of a step of m micro-batches is sum of F_s up to Q + (m - 1) (F_Q + B_Q) + the
largest, over stages, of its gradient sum and the backward passes that it still waits for. Of all prefixes of as many
layers and GPUs the one stays whose latency is least with all other layers as one stage (Fan et al. 2021, arXiv
2007.01045).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshcast.experiments.planning.stages import PlannedStage, StageTable

Prefix = tuple[PlannedStage, ...]


class PrefixSearch:
    """The search of DAPPLE's planner over one stage table."""

    def __init__(self, table: StageTable, gpus: int, microbatches: int) -> None:
        self.table, self.gpus, self.microbatches, self.visited = table, gpus, microbatches, 0

    def run(self) -> tuple[Prefix, float]:
        """The best stages that were met, and their latency [s]; infinite if nothing fits."""
        best, value, complete = self._complete(())
        best, value = (best, value) if complete else ((), math.inf)
        kept: dict[tuple[int, int], Prefix] = {(0, 0): ()}
        for layer in range(1, self.table.layers):
            found: dict[int, tuple[float, Prefix]] = {}
            for prefix, used in self._grow(kept, layer):
                stages, latency, complete = self._complete(prefix)
                if latency < found.get(used, (math.inf, ()))[0]:
                    found[used] = latency, prefix
                if complete and latency < value:
                    best, value = stages, latency
            kept |= {(layer, used): prefix for used, (_, prefix) in found.items()}
        return best, value if best else math.inf

    def _grow(self, kept: dict[tuple[int, int], Prefix], layer: int) -> Iterator[tuple[Prefix, int]]:
        """Every kept prefix with one more stage that ends before `layer`, and the GPUs that it uses."""
        for (first, used), prefix in kept.items():
            for number, option in enumerate(self.table.options):
                if used + option.gpus < self.gpus:
                    yield (*prefix, PlannedStage(range(first, layer), number)), used + option.gpus

    def _complete(self, prefix: Prefix) -> tuple[Prefix, float, bool]:
        """A prefix with all other layers as the best one stage on all other GPUs, or on as many as an option has; the
        latency [s], and whether all GPUs are used."""
        first = prefix[-1].layers.stop if prefix else 0
        left = self.gpus - sum(self.table.options[one.option].gpus for one in prefix)
        size = max((one.gpus for one in self.table.options if one.gpus <= left), default=0)
        found: tuple[Prefix, float, bool] = ((), math.inf, False)
        for number, option in enumerate(self.table.options):
            if option.gpus == size:
                stages = (*prefix, PlannedStage(range(first, self.table.layers), number))
                self.visited += 1
                latency = pipeline_latency(self.table, stages, self.microbatches)
                found = min(found, (stages, latency, size == left), key=lambda one: one[1])
        return found


def pipeline_latency(table: StageTable, stages: Sequence[PlannedStage], microbatches: int) -> float:
    """DAPPLE's latency of a step [s]; infinite if a stage does not fit with the micro-batches in flight."""
    cells = [(one.layers[0], one.layers[-1], one.option) for one in stages]
    if any(table.behind[cell] < len(cells) - 1 - place for place, cell in enumerate(cells)):
        return math.inf
    both, forward = [float(table.seconds[cell]) for cell in cells], [float(table.forward[cell]) for cell in cells]
    backward = [one - other for one, other in zip(both, forward, strict=True)]
    pivot = len(cells) - 1
    for place in range(len(cells) - 2, -1, -1):
        if (microbatches - 1) * (both[place] - both[pivot]) > sum(both[place + 1 : pivot]):
            pivot = place
    ending = max(
        float(table.once[cell]) + (sum(backward[place : pivot + 1]) if place <= pivot else -sum(backward[pivot:place]))
        for place, cell in enumerate(cells)
    )
    return sum(forward[: pivot + 1]) + (microbatches - 1) * both[pivot] + ending
