"""Least durations and memory of the passes of every kind of unit of a model, from which a stage's are put together.

The embedding, each kind of layer and the output layer are lowered and priced alone, at the plan's degrees. What a stage
of any number of layers takes at least follows without lowering it: the (max,+) matrix M of consecutive blocks is the
product of theirs, and so M[s, s] is at least the sum of the blocks' M[s, s], for every stream s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import numpy as np

from simulator.engine.maxplus import NEVER, Coordinates, product
from simulator.forecast.lowering import make_lowering
from simulator.forecast.program import host_launch_seconds
from simulator.forecast.shared_work import SharedWork
from simulator.ir.ops import Param, StageOps, Transfer
from simulator.plan.plan import Plan
from simulator.program.memory_profile import Profile
from simulator.program.task import Task, make_task
from simulator.scheduling.lower_bound import PASSES, StageTimes


@dataclass(eq=False)
class UnitKind:
    """One kind of unit of a model, alone in a stage.

    stage_ops: its ops.
    tasks: its passes, by kind of action.
    """

    stage_ops: StageOps
    tasks: dict[str, Task]

    @cached_property
    def params(self) -> list[tuple[Param, int]]:
        return self.stage_ops.params()

    @cached_property
    def ends(self) -> tuple[int, int]:
        """Bytes of the input and of the output that stay for the backward pass."""
        first, last = self.stage_ops.unit_runs[0], self.stage_ops.unit_runs[-1]
        return first.nbytes_in if first.residual_in else 0, last.nbytes if last.residual_out else 0


@dataclass(eq=False)
class UnitPrices:
    """Prices of the passes of a plan, for any number of its layers in a stage.

    kinds: kinds of units: the embedding, those of layers, the output layer.
    of_layer: the kind of every layer.
    """

    kinds: list[UnitKind]
    of_layer: np.ndarray
    coordinates: Coordinates
    _shared: SharedWork
    _matrices: dict[tuple[int, str, int], np.ndarray] = field(default_factory=dict)

    def counts(self, layers: range, first: bool, last: bool) -> tuple[tuple[int, int], ...]:
        """The kinds of a stage in forward order, each with its number of units in a row."""
        found = [(0, 1)] if first else []
        for kind in self.of_layer[layers.start : layers.stop].tolist():
            if found and found[-1][0] == kind:
                found[-1] = kind, found[-1][1] + 1
            else:
                found.append((kind, 1))
        return tuple(found + ([(len(self.kinds) - 1, 1)] if last else []))

    def matrix(self, kind: int, action: str, count: int) -> np.ndarray:
        """The matrix of `count` units of a kind, one after another."""
        key = kind, action, count
        if key not in self._matrices:
            parts = self.kinds[kind].tasks[action].parts
            if len(parts) == 1:
                parts = (replace(parts[0], count=count * parts[0].count),)
                count = 1
            order = [self.coordinates.power(part) for part in parts] * count
            self._matrices[key] = reduce(lambda a, b: product(b, a), order)
        return self._matrices[key]

    def hop_seconds(self, plan: Plan) -> float:
        """Seconds of a message between two stages of a plan, at the most shares that it may be sent in."""
        nbytes = self.kinds[0].stage_ops.message_nbytes
        if plan.job.framework.scatter_gather_tensors_in_pipeline:
            nbytes //= plan.tensor_ranks
        price = self._shared.device_costs(plan)[0].estimate
        return float(sum(price(Transfer(nbytes, plan.pipeline_axis, 0, 1))[::2]))

    @cached_property
    def least_compute(self) -> float:
        """Seconds of the kernels of all layers, forward and backward, of one micro-batch on the ranks of a layer."""
        return float(sum(self._busy[kind][PASSES.index(a)][0] for kind in self.of_layer.tolist() for a in ("F", "BW")))

    def stage_times(self, stages: Sequence[tuple[tuple[int, int], ...]], hop: float = 0.0) -> StageTimes:
        """Least durations of the passes of stages.

        stages: kinds and numbers of units of each, as of `counts`. hop: seconds of a message between two stages.
        """
        axes = self.coordinates
        streams = len(axes.streams) + (axes.host is not None)
        distinct = list(dict.fromkeys(stages))
        found = StageTimes.zeros(len(distinct), streams, hop)
        for i, stage in enumerate(distinct):
            for j, action in enumerate(PASSES):
                order = stage if action == "F" else stage[::-1]
                whole = reduce(lambda a, b: product(b, a), [self.matrix(k, action, n) for k, n in order])
                own = whole.diagonal()[:streams]
                found.stream[i, j] = np.where(own > NEVER, own, 0.0)
                found.path[i, j] = max(whole[axes.port, axes.port], 0.0)
                found.from_input[i, j] = max(whole[0, axes.port], 0.0)
                found.to_result[i, j] = max(whole[axes.port, 0], 0.0)
                for k, n in stage:
                    busy = self._busy[k][j]
                    found.busy[i, j, : len(busy)] += n * busy
        return found.take([distinct.index(stage) for stage in stages])

    @cached_property
    def _busy(self) -> list[list[np.ndarray]]:
        """Seconds of all ops of one unit on every stream [kinds][passes]."""
        at, found = self.coordinates.at, []
        for kind in self.kinds:
            rows = []
            for action in PASSES:
                row = np.zeros(len(self.coordinates.streams))
                for part in kind.tasks[action].parts:
                    for op, seconds in zip(part.block.ops, part.seconds, strict=True):
                        row[at[op.stream]] += part.count * seconds
                rows.append(row)
            found.append(rows)
        return found

    # ------------------------------------------------------------------------------------------ memory

    def stage_memory(self, stage: tuple[tuple[int, int], ...]) -> tuple[float, float, float]:
        """Memory of a stage in one micro-batch [bytes]: what its forward pass leaves, and the peaks of its forward and
        of its backward pass, each relative to its begin."""
        first, last = self.kinds[stage[0][0]], self.kinds[stage[-1][0]]
        begin, end = Profile.step(first.ends[0], "activations"), Profile.step(-last.ends[1], "activations")
        forward = Profile.in_series([(begin, 1), *self._profiles(stage, "F"), (end, 1)])
        backward = Profile.in_series(self._profiles(stage[::-1], "BW"))
        return forward.grown, forward.peak, backward.peak

    def _profiles(self, stage: Sequence[tuple[int, int]], action: str) -> Iterator[tuple[Profile, int]]:
        for kind, count in stage:
            parts = self.kinds[kind].tasks[action].parts
            if len(parts) == 1:
                yield parts[0].block.memory, count
            else:
                for _ in range(count):
                    yield from ((part.block.memory, part.count) for part in parts)

    def params(self, stage: tuple[tuple[int, int], ...]) -> tuple[tuple[Param, int], ...]:
        """The parameters of a stage on one rank, each with its number of copies."""
        return tuple((param, n * count) for kind, n in stage for param, count in self.kinds[kind].params)


def price_units(plan: Plan, shared: SharedWork) -> UnitPrices:
    """The prices of the units of a plan whose stages are alike."""
    price, host = shared.device_costs(plan)[0].estimate, host_launch_seconds(plan)
    lowering, architecture, model = make_lowering(plan, shared.units), plan.architecture, plan.model
    parts: dict[tuple[object, str], object] = {}

    def kind(layers: range, first: bool = False, last: bool = False) -> UnitKind:
        stage_ops = lowering.run(architecture.stage(layers, first, last))
        tasks = {
            action: make_task(stage_ops, action, price, again=False, known=parts, blocks=shared.blocks)  # type: ignore[arg-type]
            for action in PASSES
        }
        return UnitKind(stage_ops, tasks)

    known: dict[object, int] = {}
    kinds, of_layer = [kind(range(0), first=True)], []
    for layer in range(model.layers):
        units = architecture.stage(range(layer, layer + 1), False, False).units
        key = tuple(unit.lowering_key for unit in units), architecture.group_start(layer)
        if key not in known:
            known[key] = len(kinds)
            kinds.append(kind(range(layer, layer + 1)))
        of_layer.append(known[key])
    kinds.append(kind(range(0), last=True))
    coordinates = Coordinates((task for one in kinds for task in one.tasks.values()), host)
    return UnitPrices(kinds, np.array(of_layer), coordinates, shared)
