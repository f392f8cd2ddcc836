"""Stages on the GPUs of several kinds of nodes, kind by kind: their prices, and the job of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.cores.ordered_stages import costs_of
from meshcast.experiments.planning.cores.stage_dp import plan_stages
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.pricing.mixed import MixedProblem, PricedNodes, link_bandwidth
from meshcast.experiments.planning.pricing.pipelines import range_bytes
from meshcast.experiments.planning.problem import Changes, Problem
from meshcast.experiments.planning.stages import StageTable
from meshcast.hardware.errors import PlanError


class StageChoice(NamedTuple):
    """The GPUs of a stage and how it uses them.

    kind: of its nodes.
    table, number: prices of its kind, and the option in them.
    first: its first rank.
    """

    kind: PricedNodes
    table: StageTable
    number: int
    first: int

    @property
    def plan(self) -> Mapping[str, Any]:
        """Keys of the stage in a job."""
        return self.table.options[self.number].plan

    @property
    def seconds(self) -> np.ndarray:
        """Of a micro-batch with the layers from first to last [s; layers, layers]."""
        return self.table.seconds[:, :, self.number]

    @property
    def once(self) -> np.ndarray:
        """Of a step, for the exchange of gradients and the update [s; layers, layers]."""
        return self.table.once[:, :, self.number]


class KindStages:
    """Stages on all GPUs of a mixed cluster, in an order of its kinds.

    problem: the job.
    kinds: in the order of ranks; those that are left out stay unused.
    """

    def __init__(self, problem: MixedProblem, kinds: Sequence[PricedNodes]) -> None:
        self.kinds = tuple(kinds)
        self.problem = problem
        self.more = problem.order_kinds(kinds)

    def choose(self, strategies: Sequence[tuple[int, int]]) -> list[StageChoice]:
        """Returns the stages of (data, tensor) parallelism, without recomputation, on the next free GPUs. Raises
        PlanError where a stage would have GPUs of several kinds, or degrees that its kind does not have."""
        choices, first = [], 0
        for data, tensor in strategies:
            kind = self._kind_of(first, data * tensor)
            table = kind.problem.stages(recompute=False)
            wanted = {"tp": tensor, "dp": data, "recompute": "none"}
            number = next((i for i, option in enumerate(table.options) if dict(option.plan) == wanted), None)
            if number is None:
                rule = f"{kind.name} has no stages of {data} x {tensor} GPUs for these micro-batches"
                raise PlanError("plan.stages", rule, "Choose other degrees", wanted)
            choices.append(StageChoice(kind, table, number, first))
            first += data * tensor
        return choices

    def _kind_of(self, first: int, count: int) -> PricedNodes:
        begin = 0
        for kind in self.kinds:
            if begin <= first and first + count <= begin + kind.gpus:
                return kind
            begin += kind.gpus
        raise PlanError("plan.stages", "a stage has GPUs of one kind", "Choose other groups", [first, first + count])

    def fitting_seconds(self, choice: StageChoice, behind: int) -> np.ndarray:
        """Returns the seconds of a stage that others follow, infinite where it does not fit [s; layers, layers]."""
        return np.where(choice.table.behind[:, :, choice.number] >= behind, choice.seconds, np.inf)

    def memory_left(self, choices: Sequence[StageChoice], layers: Sequence[int]) -> list[float]:
        """Returns the bytes that the ranks of every stage have left; negative: it does not fit."""
        need = []
        for place, choice in enumerate(choices):
            units = choice.kind.problem.units_of(choice.table.options[choice.number])
            need.append(range_bytes(units, min(self.problem.microbatches, len(choices) - place)))
        held = costs_of(need, layers)
        return [choice.kind.problem.memory - nbytes for choice, nbytes in zip(choices, held, strict=True)]

    def step_seconds(self, choices: Sequence[StageChoice], layers: Sequence[int]) -> float:
        """Returns the sum of stages, (m - 1) x the slowest, messages, and the largest exchange with its update [s]."""
        seconds = costs_of([choice.seconds for choice in choices], layers)
        once = max(costs_of([choice.once for choice in choices], layers))
        messages = 0.0
        for choice, after in pairwise(choices):
            bandwidth = link_bandwidth(self.kinds, after.first - 1, after.first)
            messages += self.problem.message_nbytes(int(choice.plan["dp"])) / bandwidth
        return sum(seconds) + (self.problem.microbatches - 1) * max(seconds) + messages + once

    def write(self, choices: Sequence[StageChoice], layers: Sequence[int]) -> Changes:
        """Returns the changes of the job that execute the stages."""
        entries = [{**choice.plan, "layers": held} for choice, held in zip(choices, layers, strict=True)]
        return self.problem.entries_plan(entries, self.more)


def propose_cheapest(
    planner: Planner, problem: Problem, best: tuple[float, Changes] | None, visited: int, whole: bool
) -> Proposal:
    """Returns the cheapest plan of an enumeration, proven if that was whole. Raises PlanError without a plan."""
    if best is None:
        remedy = "Give more GPUs, or GPUs of more memory" if whole else "Its enumeration was cut: give it more time"
        raise planner.nothing_fits(problem, remedy)
    value, plan = best
    return Proposal(plan, value, visited, PlanProof(value, value, "enumeration of its space") if whole else None)


def bound_stages(stages: KindStages, known: float) -> float:
    """Returns a bound of steps of stages on powers of two of equal GPUs, without recomputation; infinite if none fit or
    none is below `known` [s]."""
    tables, places, first = [], list[range](), 0
    for kind in stages.kinds:
        try:
            table = kind.problem.stages(recompute=False)
        except PlanError:  # degrees that do not suit the micro-batches
            table = None
        if table is not None:
            tables.append(table.select(lambda option: option.gpus.bit_count() == 1))
            places += [range(first, first + kind.gpus)] * len(tables[-1].options)
        first += kind.gpus
    if not tables:
        return math.inf
    options = tuple(option for table in tables for option in table.options)
    arrays = (np.concatenate([table[place] for table in tables], axis=-1) for place in range(1, len(tables[0])))
    sequence = plan_stages(
        StageTable(options, *arrays), stages.problem.gpus, stages.problem.microbatches, places=places
    )
    return sequence.bound if sequence is not None and sequence.bound < known else math.inf
