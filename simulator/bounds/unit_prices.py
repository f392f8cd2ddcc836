"""Least durations and memory of the passes of every kind of unit of a model, from which a stage's are put together.

The embedding, each kind of layer and the output layer are lowered and priced alone, at the plan's degrees. What a stage
of any number of layers takes at least follows without lowering it: the (max,+) matrix M of consecutive blocks is the
product of theirs, and so M[s, s] is at least the sum of the blocks' M[s, s], for every stream s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered
from meshcast.simulator.bounds.schedule_bound import FORWARD, INPUTS, PASSES, WHOLE, StageTimes
from meshcast.simulator.engine.maxplus import NEVER, Coordinates, product
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.program import host_launch_seconds
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.modules import Stage
from meshcast.simulator.ir.ops import COMPUTE, Gemm, Param, StageOps, Work
from meshcast.simulator.lowering.offload import IN, OUT
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import CompiledBlocks, Price
from meshcast.simulator.program.memory_profile import Profile
from meshcast.simulator.program.task import Task, make_task
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme
from meshcast.simulator.schemes.data.shared.reduce_buckets import without_buckets

StageUnits = tuple[tuple[int, int], ...]
"""The kinds of the units of a stage in forward order, each with its number of units in a row."""

Stages = tuple[StageUnits, ...]
"""The units of the parts of a model."""

LARGE = 100_000
"""Elements from which on a parameter is sharded wherever weights are (DeepSpeed's `param_persistence_threshold`)."""


@dataclass(eq=False)
class UnitKind:
    """One kind of unit of a model, alone in a stage.

    stage_ops: its ops.
    tasks: its passes, by kind of action.
    """

    stage_ops: StageOps
    tasks: dict[str, Task]

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
    of_recomputed: its kind where it is recomputed; None: no layer is.
    """

    kinds: list[UnitKind]
    of_layer: np.ndarray
    of_recomputed: np.ndarray | None
    coordinates: Coordinates

    @remembered
    def stages(self, layers: tuple[int, ...], recomputed: int | None = None) -> Stages:
        """Returns the units of the parts of a model.

        layers: the number of layers of every part.
        recomputed: layers of every part that are recomputed; None: all.
        """
        ends, last = np.cumsum([0, *layers]).tolist(), len(layers) - 1
        kinds = kinds_of_layers(layers, self.of_layer, self.of_recomputed, recomputed).tolist()
        runs = [[(kind, len(list(run))) for kind, run in groupby(kinds[a:b])] for a, b in pairwise(ends)]
        runs[0].insert(0, (0, 1))
        runs[last].append((len(self.kinds) - 1, 1))
        return tuple(tuple(run) for run in runs)

    @remembered
    def matrix(self, kind: int, action: str, count: int) -> np.ndarray:
        """Returns the matrix of `count` units of a kind, in series."""
        parts = self.kinds[kind].tasks[action].parts
        if len(parts) == 1:
            parts = (replace(parts[0], count=count * parts[0].count),)
            count = 1
        order = [self.coordinates.power(part) for part in parts] * count
        return reduce(lambda a, b: product(b, a), order)

    @property
    def message_nbytes(self) -> int:
        """Bytes of a message between two stages, before ranks share it."""
        return self.kinds[0].stage_ops.message_nbytes

    @property
    def copy_seconds(self) -> float:
        """Seconds of the copies of the activations of a layer to the host, or back."""
        return max(self._stream_seconds(OUT, "F"), self._stream_seconds(IN, "BW"))

    def _stream_seconds(self, stream: str, action: str) -> float:
        """Returns the seconds of the ops of a layer on a stream in a pass; of the kind of layers that has least."""
        at = self.coordinates.at.get(stream)
        kinds = range(1, len(self.kinds) - 1)
        return 0.0 if at is None else min(float(self._busy[kind][PASSES.index(action)][at]) for kind in kinds)

    @cached_property
    def unit_times(self) -> StageTimes:
        """Least durations of the passes of every kind of unit, as if each were a part of the model."""
        return self.stage_times(tuple(((kind, 1),) for kind in range(len(self.kinds))))

    @property
    def longest_kernels(self) -> np.ndarray:
        """Seconds of the longest kernel of the forward pass of a unit of every kind [kinds]."""
        longest = np.zeros(len(self.kinds))
        for number, kind in enumerate(self.kinds):
            for part in kind.tasks["F"].parts:
                kernels = (part.seconds[i] for i, op in enumerate(part.block.ops) if op.stream == COMPUTE)
                longest[number] = max(longest[number], *kernels, 0.0)
        return longest

    def stage_times(self, stages: Stages, hop: float = 0.0) -> StageTimes:
        """Returns the least durations of the passes of stages. hop: seconds of a message between two stages."""
        return replace(self._times_without_messages(stages), hop=hop)

    @remembered
    def _times_without_messages(self, stages: Stages) -> StageTimes:
        distinct = {stage: i for i, stage in enumerate(dict.fromkeys(stages))}
        rows = [self._rows_of(stage) for stage in distinct]
        order = [distinct[stage] for stage in stages]
        stream, busy, path, from_input, to_result = (np.array(column)[order] for column in zip(*rows, strict=True))
        return StageTimes(stream, busy, path, from_input, to_result, 0.0)

    @remembered
    def _rows_of(self, stage: StageUnits) -> tuple[np.ndarray, ...]:
        """Returns the times of a stage, as `StageTimes` has them."""
        wholes = []
        for action in PASSES:
            order = stage if action == "F" else stage[::-1]
            wholes.append(reduce(lambda a, b: product(b, a), [self.matrix(kind, action, n) for kind, n in order]))
        busy = sum((n * self._busy[kind] for kind, n in stage), np.zeros_like(self._busy[0]))
        return rows_of_passes(self.coordinates, np.array(wholes), busy)

    @cached_property
    def _busy(self) -> np.ndarray:
        """Seconds of all ops of a unit on every stream [kinds, passes, streams]."""
        at, shape = self.coordinates.at, (len(self.kinds), len(PASSES), len(self.coordinates.streams))
        busy = np.zeros(shape)
        for rows, kind in zip(busy, self.kinds, strict=True):
            for row, action in zip(rows, PASSES, strict=True):
                for part in kind.tasks[action].parts:
                    for op, seconds in zip(part.block.ops, part.seconds, strict=True):
                        row[at[op.stream]] += part.count * seconds
        return busy

    # ------------------------------------------------------------------------------------------ memory

    @remembered
    def stage_memory(self, stage: StageUnits) -> tuple[float, float, float]:
        """Returns the memory of a stage in a micro-batch [bytes]: what its forward pass leaves, and the peaks of its
        forward and of its backward pass, each relative to its begin."""
        forward, backward = self._profile(stage, "F"), self._profile(stage, "BW")
        return forward.grown, forward.peak, backward.peak

    def _profile(self, stage: StageUnits, action: str) -> Profile:
        """Returns the memory of a pass of a stage: its input, or the gradient of its output, arrives before it."""
        arrives, leaves = self.kinds[stage[0][0]].ends[0], self.kinds[stage[-1][0]].ends[1]
        if action != "F":
            stage, arrives, leaves = stage[::-1], leaves, arrives
        ends = [(Profile.step(nbytes, "activations"), 1) for nbytes in (arrives, -leaves)]
        between = [] if action == "W" else ends
        return Profile.in_series([*between[:1], *self._profiles(stage, action), *between[1:]])

    @remembered
    def activations(self, stages: Stages) -> np.ndarray:
        """Returns the memory of stages in a micro-batch, as `stage_memory` has it [stages, 3] [bytes]."""
        return np.array([self.stage_memory(stage) for stage in stages])

    def pass_memory(self, stages: Stages) -> tuple[np.ndarray, np.ndarray]:
        """Returns what a pass of every kind leaves, and its peak relative to its begin [stages, kinds] [bytes]."""
        rows = np.array([self._pass_memory(stage) for stage in stages])
        return rows[:, 0], rows[:, 1]

    @remembered
    def _pass_memory(self, stage: StageUnits) -> np.ndarray:
        profiles = [self._profile(stage, action) for action in PASSES]
        return np.array([[profile.grown for profile in profiles], [profile.peak for profile in profiles]])

    def elements(self, stages: Stages, ends: bool = True) -> np.ndarray:
        """Returns the parameters of stages on a rank [stages]. ends: with the embedding and the output layer."""
        counted = range(len(self.kinds)) if ends else range(1, len(self.kinds) - 1)
        return np.array(
            [sum(self._elements[kind] * n for kind, n in stage if kind in counted) for stage in stages], float
        )

    @cached_property
    def _elements(self) -> list[int]:
        """Parameters of a unit of every kind."""
        return [sum(param.size * count for param, count in kind.stage_ops.params()) for kind in self.kinds]

    def _profiles(self, stage: Sequence[tuple[int, int]], action: str) -> Iterator[tuple[Profile, int]]:
        for kind, count in stage:
            parts = self.kinds[kind].tasks[action].parts
            if len(parts) == 1:
                yield parts[0].block.memory, count
            else:
                for _ in range(count):
                    yield from ((part.block.memory, part.count) for part in parts)


def rows_of_passes(axes: Coordinates, wholes: np.ndarray, busy: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the times of a stage at one or several prices, as `StageTimes` has them [..., passes, streams].

    wholes: matrices of its passes [..., passes, coordinates, coordinates].
    busy: seconds of their ops on every stream [..., passes, streams].
    """
    streams = len(axes.streams) + (axes.host is not None)
    delay = np.maximum(np.diagonal(wholes, axis1=-2, axis2=-1)[..., :streams], 0.0)
    path = np.maximum(wholes[..., axes.port, axes.port], 0.0)
    from_input, to_result = wholes[..., :streams, axes.port].copy(), wholes[..., axes.port, :streams].copy()
    for column in (from_input, to_result):
        column[..., 0] = np.maximum(column[..., 0], np.where(busy[..., 0] > 0.0, 0.0, NEVER))
    every = np.zeros((*busy.shape[:-1], streams))
    every[..., : len(axes.streams)] = busy
    return delay, every, path, from_input, to_result


def add_recomputed(times: StageTimes, longest: np.ndarray) -> StageTimes:
    """Returns the times of kinds of units with every kind of layer once more, recomputed, as `join_recomputed` adds
    them.

    Its forward pass runs again before its backward pass, but for its longest kernel, whose output nobody needs.
    longest: seconds of that kernel [kinds].
    """
    last = len(longest) - 1
    again = times.busy[1:last, FORWARD, 0] - longest[1:last]
    order = [0, *range(1, last), *range(1, last), last]
    columns = {name: getattr(times, name)[order] for name in StageTimes.__dataclass_fields__ if name != "hop"}
    for name in ("stream", "busy"):
        columns[name][last:-1, [WHOLE, INPUTS], 0] += again[:, None]
    return StageTimes(**columns, hop=times.hop)


class UnitLayout(NamedTuple):
    """The kinds of units of a group.

    elements: parameters of a unit [kinds].
    reduced: those whose gradients are summed along the same axes [kinds].
    matrices: of these the ones of large parameters of layers [kinds].
    of_layer: the kind of every layer [layers].
    of_recomputed: its kind where it is recomputed; None: no layer is.
    """

    elements: np.ndarray
    reduced: dict[tuple[str, ...], np.ndarray]
    matrices: dict[tuple[str, ...], np.ndarray]
    of_layer: np.ndarray
    of_recomputed: np.ndarray | None

    def with_recomputed(self) -> UnitLayout:
        """Returns the layout in which every kind of layer comes once more, recomputed, as `join_recomputed` adds
        them."""
        layers = [*range(1, len(self.elements) - 1)]
        order = [0, *layers, *layers, len(self.elements) - 1]
        reduced, matrices = (
            {axes: elements[order] for axes, elements in sums.items()} for sums in (self.reduced, self.matrices)
        )
        return UnitLayout(self.elements[order], reduced, matrices, self.of_layer, self.of_layer + len(layers))

    def count_units(self, layers: tuple[int, ...], recomputed: int | None) -> np.ndarray:
        """Returns the numbers of units in the parts of a model [parts, kinds]. layers, recomputed: as in
        `UnitPrices.stages`."""
        counts = np.zeros((len(layers), len(self.elements)))
        counts[0, 0], counts[-1, -1] = 1, 1
        kinds = kinds_of_layers(layers, self.of_layer, self.of_recomputed, recomputed)
        np.add.at(counts, (np.repeat(np.arange(len(layers)), layers), kinds), 1)
        return counts


@dataclass(frozen=True)
class LoweredUnits:
    """The ops of the kinds of units of a plan, each alone in a stage, and the kind of every layer.

    price, host: prices of ops, and time of the host to launch an op [s].
    weights: number format of the weights.
    reduces: axes along which the gradient of a parameter is summed.
    of_recomputed: the kind of every layer where it is recomputed; None: no layer is.
    """

    stages: tuple[StageOps, ...]
    of_layer: np.ndarray
    price: Price
    host: float
    weights: str
    reduces: Callable[[Param], tuple[str, ...]]
    of_recomputed: np.ndarray | None = None

    @property
    def of_new_gradients(self) -> LoweredUnits:
        """These, with GEMMs that write weight gradients to new tensors and add them to none."""
        return replace(self, price=price_new_gradients(self.price, self.weights))

    @cached_property
    def layout(self) -> UnitLayout:
        """The kinds of units without recomputed layers."""
        return UnitLayout(self.elements, self.count_reduced(), self.count_reduced(matrices=True), self.of_layer, None)

    @property
    def elements(self) -> np.ndarray:
        """Parameters of a unit of every kind [kinds]."""
        elements = np.zeros(len(self.stages))
        for kind, param, count in self._distinct_params():
            elements[kind] += param.size * count
        return elements

    def _distinct_params(self) -> Iterator[tuple[int, Param, int]]:
        """Yields the parameters of a unit of every kind, each with their number; a matrix that embedding and output
        layer share counts as the embedding's, since a device may have both."""
        for kind, stage_ops in enumerate(self.stages):
            for param, count in stage_ops.params():
                if not (param.tied and kind == len(self.stages) - 1):
                    yield kind, param, count

    def count_reduced(self, matrices: bool = False) -> dict[tuple[str, ...], np.ndarray]:
        """Returns the parameters of a unit of every kind whose gradients are summed along the same axes [kinds].

        matrices: only large ones of layers, which are sharded wherever weights are.
        """
        sums = defaultdict[tuple[str, ...], np.ndarray](lambda: np.zeros(len(self.stages)))
        for kind, param, count in self._distinct_params():
            if param.trained and (axes := self.reduces(param)):
                sums[axes][kind] += param.size * count * (not matrices or (param.in_layer and param.size >= LARGE))
        return dict(sums)

    def join_recomputed(self, other: LoweredUnits) -> LoweredUnits:
        """Returns these units, and the layers of `other`, which are recomputed."""
        stages = (*self.stages[:-1], *other.stages[1:-1], self.stages[-1])
        return replace(self, stages=stages, of_recomputed=other.of_layer + len(self.stages) - 2)

    def grown(self, blocks: CompiledBlocks) -> np.ndarray:
        """Returns what the forward pass of a unit leaves for its backward pass, at least, in a stage of several [kinds]
        [bytes]."""
        runs = [stage.unit_runs for stage in self.stages]
        grown = np.array(
            [sum(run.count * blocks.block(run, "F", False).memory.grown for run in units) for units in runs]
        )
        arrives = [units[0].nbytes_in if units[0].residual_in else 0 for units in runs[1:]]
        leaves = [units[-1].nbytes if units[-1].residual_out else 0 for units in runs[:-1]]
        # The input of a stage arrives before its pass, and its output leaves.
        grown[0] -= max(leaves)
        grown[1:] += min(0, min(arrives) - max(leaves))
        return grown


def price_new_gradients(price: Price, dtype: str) -> Price:
    """Returns prices with which GEMMs write weight gradients to new tensors of a number format, and add them to none.
    price: of works."""

    def price_new(work: Work) -> tuple[float, float, float]:
        if isinstance(work, Gemm) and work.accumulate:
            work = replace(work, accumulate=False, out_dtype=dtype)
        return price(work)

    return price_new


def lower_units(plan: Plan, shared: SharedWork) -> LoweredUnits:
    """Returns the units of a plan whose stages are alike. They hold no buckets, which plans with a single replica have
    not."""
    lowering = make_lowering(plan, shared.units, keeps_modules=True)
    parts, of_layer = list_unit_stages(plan)
    stages = tuple(without_buckets(lowering.run(stage)) for stage in parts)
    price = shared.device_costs(plan)[0].estimate
    # A plan of annotated layouts has no data scheme.
    sums = [scheme.reduces for scheme in plan.schemes if isinstance(scheme, DataScheme)]
    host, weights = host_launch_seconds(plan), plan.job.framework.weights
    return LoweredUnits(stages, of_layer, price, host, weights, sums[0] if sums else lambda _: ())


def list_unit_stages(plan: Plan) -> tuple[list[Stage], np.ndarray]:
    """Returns the embedding, each kind of layer and the output layer of a plan, each alone in a stage, and the kind of
    every layer."""
    architecture = plan.model_parts.architecture
    known: dict[object, int] = {}
    embedding = architecture.stage(range(0), True, False)
    stages, of_layer = [embedding], []
    for layer in range(plan.model_parts.model.layers):
        stage = architecture.stage(range(layer, layer + 1), layer == 0, False)
        if layer == 0:  # with the embedding below it, of which adapters train nothing
            stage = replace(stage, units=stage.units[len(embedding.units) :])
        key = tuple(unit.lowering_key for unit in stage.units), architecture.group_start(layer)
        if key not in known:
            known[key] = len(stages)
            stages.append(stage)
        of_layer.append(known[key])
    return [*stages, architecture.stage(range(0), False, True)], np.array(of_layer)


def price_units(units: LoweredUnits, shared: SharedWork) -> UnitPrices:
    """Returns the prices of the units of a plan."""
    kinds = []
    for stage_ops in units.stages:
        tasks = {kind: make_task(stage_ops, kind, units.price, again=False, blocks=shared.blocks) for kind in PASSES}
        kinds.append(UnitKind(stage_ops, tasks))
    coordinates = Coordinates((task for kind in kinds for task in kind.tasks.values()), units.host)
    return UnitPrices(kinds, units.of_layer, units.of_recomputed, coordinates)


def kinds_of_layers(
    layers: Sequence[int], of_layer: np.ndarray, of_recomputed: np.ndarray | None, recomputed: int | None
) -> np.ndarray:
    """Returns the kind of every layer of a model.

    layers: of every part.
    recomputed: layers of every part, from the first on, that are recomputed; None: all.
    """
    if of_recomputed is None:
        return of_layer
    places = np.concatenate([np.arange(number) for number in layers])
    return of_recomputed if recomputed is None else np.where(places < recomputed, of_recomputed, of_layer)
