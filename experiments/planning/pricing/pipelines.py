"""Pipelines of stages with equal degrees, whose layers a planner divides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.stage_prices import UnitCosts, range_largest, range_totals
from meshcast.experiments.planning.stages import StageOption, StageTable


class UniformPipeline(NamedTuple):
    """A pipeline whose stages have equal degrees.

    number, option: of the stages, in a table of stages.
    depth: number of stages.
    units: costs of the model's units.
    """

    number: int
    option: StageOption
    depth: int
    units: UnitCosts

    def stage_bytes(self, stage: int, microbatches: int) -> np.ndarray:
        """Returns the memory of a rank of a stage that holds a range of layers, under 1F1B [bytes; layers, layers]."""
        return range_bytes(self.units, min(microbatches, self.depth - stage))


def range_bytes(units: UnitCosts, flights: int) -> np.ndarray:
    """Returns the memory of a rank with a range of layers and micro-batches in flight [bytes; layers, layers]."""
    return range_totals(units.states + flights * units.kept) + range_largest(units.peak)


def uniform_pipelines(problem: JobProblem, table: StageTable) -> Iterator[UniformPipeline]:
    """Yields the pipelines of all options of a table that fill the GPUs and have a layer for every stage."""
    for number, option in enumerate(table.options):
        depth, left = divmod(problem.gpus, option.gpus)
        if not left and depth <= table.layers:
            yield UniformPipeline(number, option, depth, problem.units_of(option))


def pipeline_plan(
    problem: JobProblem, option: StageOption, layers: Sequence[int], **more: Any
) -> dict[str, dict[str, Any]]:
    """Returns the ``plan`` and ``batch`` of a pipeline whose stages have equal degrees and so many layers each."""
    plan = {**option.plan, **more}
    if len(layers) > 1:
        plan = {"schedule": "1f1b", **plan, "pp": len(layers), "partition": [*layers]}
    return {"plan": plan, "batch": {"global": problem.sequences, "micro": problem.samples // int(option.plan["dp"])}}
