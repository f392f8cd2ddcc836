"""Least durations of the passes of every kind of unit of a plan, at several sizes of micro-batches, from the works of
its operators.

A pass puts off the compute stream by its kernels in turn, and by the collectives between two of them that nothing else
hides: each step begins after the steps before it on the stream, and after the results that it waits for. On streams of
collectives these run in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshcast.hardware.remembered import remember
from meshcast.simulator.bounds.collectives import LARGE
from meshcast.simulator.bounds.micro_batches import NotAffine, ScaledWorks, check_affine
from meshcast.simulator.bounds.operators.unit_steps import PlacedWork, Step, Wait, list_steps
from meshcast.simulator.bounds.schedule_bound import FORWARD, PASSES, WEIGHTS, WHOLE, StageTimes
from meshcast.simulator.bounds.unit_prices import list_unit_stages
from meshcast.simulator.engine.maxplus import NEVER
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.program import host_launch_seconds
from meshcast.simulator.ir.modules import BatchLossUnit, MoE, Stage, every_module
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Gemm, HostLaunch, Memory, Op, Work
from meshcast.simulator.ir.scheme import Scheme, TensorScheme
from meshcast.simulator.lowering.lower import HOST_STREAM
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import Price
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import GemmCollective, TensorOverlap

ADD_OPS = (Scheme.lower, DataScheme.lower, ExpertScheme.lower, TensorOverlap.lower)
"""What lowers modules under schemes that change no kernels but those of experts with uneven loads, and GEMMs that are
cut to overlap their collectives."""

ADD_OPS_TO_STAGES = (Scheme.lower_stage, DataScheme.lower_stage, ExpertScheme.lower_stage)

ROUTER = "router"
"""The kernel after which a host that waits for it goes on."""

Steps = tuple[list[Step], list[Step]]
"""Of the forward and of the backward pass of a unit."""


class LeastTimes(NamedTuple):
    """Least durations of the passes of every kind of unit.

    of_layer: the kind of every layer.
    times, longest: by size of a micro-batch, the durations, and the longest kernel of the forward pass of every kind
        [kinds] [s].
    """

    of_layer: np.ndarray
    times: dict[int, StageTimes]
    longest: dict[int, np.ndarray]


class UnitPlan:
    """A plan as what its units do, at one size of micro-batches."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.scope = plan, make_lowering(plan).scope
        self.stages, self.of_layer = list_unit_stages(plan)

    @property
    def is_known(self) -> bool:
        """Whether lowering only adds to the works of the operators."""
        schemes = self.plan.schemes
        adds = all(type(s).lower in ADD_OPS and type(s).lower_stage in ADD_OPS_TO_STAGES for s in schemes)
        experts = [scheme for scheme in schemes if isinstance(scheme, ExpertScheme)]
        layers = [part for stage in self.stages for part in every_module(stage) if isinstance(part, MoE)]
        even = not any(scheme.marks_of(layer) for scheme in experts for layer in layers)
        return adds and even and not any(isinstance(unit, BatchLossUnit) for stage in self.stages for unit in stage.units)

    @property
    def overlap(self) -> TensorOverlap | None:
        """The scheme that overlaps the collectives of tensor parallelism."""
        return next((scheme for scheme in self.plan.schemes if isinstance(scheme, TensorOverlap)), None)

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The axes of tensor parallelism."""
        schemes = (scheme for scheme in self.plan.schemes if isinstance(scheme, TensorScheme))
        return tuple(axis for scheme in schemes for axis in scheme.over)

    def steps(self, stage: Stage) -> Iterator[tuple[int, Steps]]:
        """Yields the steps of every unit of a stage, with the number of equal units."""
        yield from ((unit.count, list_steps(self.scope, unit)) for unit in stage.units)


def least_times(
    first: Plan,
    second: Plan,
    kernels: ScaledWorks,
    price: Price,
    sizes: Sequence[int],
    known: dict[Hashable, KindTimes],
    degrees: Hashable,
) -> LeastTimes | None:
    """Returns the least durations of the passes of every kind of unit; None if lowering may change their works, or if
    these are not affine in the size of a micro-batch.

    first, second: the plan with micro-batches of one and of two sequences.
    kernels: prices of kernels at some sizes. price: of collectives.
    known: durations of units without experts. degrees: what these follow from.
    """
    small, large = UnitPlan(first), UnitPlan(second)
    if not small.is_known or not large.is_known:
        return None
    works = _StepWorks(small, kernels, price, np.array(sizes))

    def find(one: Stage, two: Stage) -> KindTimes:
        make = lambda: _of_kind(works, zip(small.steps(one), large.steps(two), strict=True))  # noqa: E731
        operators = [operator for unit in one.units for operator in unit.operators()]
        if any(operator.view in first.mesh.views for operator in operators):
            return make()
        key = degrees, *(unit.lowering_key or unit for unit in one.units)
        return remember(known, key, make)

    try:
        check_affine(np.array_equal(small.of_layer, large.of_layer))
        kinds = [find(*stages) for stages in zip(small.stages, large.stages, strict=True)]
    except NotAffine:
        return None
    return _to_times(small.of_layer, kinds, sizes)


class _StepWorks:
    """Seconds of works at several sizes of micro-batches.

    unit_plan: with micro-batches of one sequence.
    kernels: prices of kernels. price: of other works.
    """

    def __init__(self, unit_plan: UnitPlan, kernels: ScaledWorks, price: Price, sizes: np.ndarray) -> None:
        self._kernels, self._price, self._more = kernels, price, sizes - 1
        self._overlap, self._axes = unit_plan.overlap, unit_plan.tensor_axes
        self._rates: dict[Work, float] = {}
        host = unit_plan.scope.host
        self.waits = host.waits
        """Operations at which the host waits for the GPU."""
        self.launch = price(HostLaunch(1.0))[0] if host.waits else host_launch_seconds(unit_plan.plan)
        """Time of the host to launch an op of the framework [s]."""
        if host.graphed:
            self.launch = 0.0
        self.none = np.zeros(len(sizes))

    def is_hidden(self, stream: str) -> bool:
        """Returns whether the collectives of a stream may be hidden by the kernels beside them."""
        return self._overlap is not None and stream.partition("-")[0] == self._overlap.family

    def of_collective(self, small: Work, large: Work) -> np.ndarray:
        """Returns the least seconds of a collective [sizes] [s]: at the rate of a very large one."""
        if not isinstance(small, Collective) or not isinstance(large, Collective):
            return self.none
        kind = replace(small, nbytes=LARGE)
        check_affine(kind == replace(large, nbytes=LARGE))
        if kind not in self._rates:
            self._rates[kind] = self._price(kind)[0] / LARGE
        return self._rates[kind] * (small.nbytes + self._more * (large.nbytes - small.nbytes))

    def may_cut(self, work: Work, phase: str) -> bool:
        """Returns whether a kernel may be cut to overlap a collective."""
        return self._overlap is not None and phase != "W" and isinstance(work, Gemm)

    def of_kernel(self, small: Work, large: Work, phase: str) -> np.ndarray:
        """Returns the least seconds of a kernel [sizes] [s], of a GEMM whole or cut."""
        seconds = self._kernels(small, large)[0]
        if not self.may_cut(small, phase):
            return seconds
        assert self._overlap is not None and isinstance(small, Gemm) and isinstance(large, Gemm)
        cuts = (_cut(self._overlap, self._axes, product, phase) for product in (small, large))
        for parts in zip(*cuts, strict=True):
            both = zip(*parts, strict=True)
            seconds = np.minimum(seconds, sum((self._kernels(a, b)[0] for a, b in both), self.none))
        return seconds


def _cut(overlap: TensorOverlap, axes: tuple[str, ...], product: Gemm, phase: str) -> list[list[Work]]:
    """Returns the parts of a GEMM that a scheme overlaps with the all-gather before it, and with the reduce-scatter
    behind it."""
    ranks, every = overlap.mesh.size(axes), []
    for operation in overlap.collectives:
        gathers = operation == "all_gather"
        nbytes = ranks * max(int(2 * product.m * (product.k if gathers else product.n)) // ranks, 1)
        gemm = Op("product", work=product, phase=phase)
        collective = Op("collective", overlap.family, Collective(operation, nbytes, axes), phase=phase)
        first, last = (collective, gemm) if gathers else (gemm, collective)
        last.after = [first]
        fragment = Fragment(forward=[first, last])
        rewrite = Rewrite(fragment)
        overlap.replace_pair(rewrite, GemmCollective(collective, (gemm,), ranks))
        every.append([op.work for op in rewrite.apply().forward if isinstance(op.work, Gemm)])
    return every


class KindTimes(NamedTuple):
    """Least seconds of a kind of unit.

    late: by how much a pass puts off the compute stream and the host, forward and backward [2, 2, sizes] [s].
    busy: of the works on each stream, by stream and pass [sizes] [s].
    longest: the longest kernel of the forward pass [sizes] [s].
    """

    late: np.ndarray
    busy: dict[tuple[str, int], np.ndarray]
    longest: np.ndarray


def _of_kind(works: _StepWorks, pairs: Iterable[tuple[tuple[int, Steps], tuple[int, Steps]]]) -> KindTimes:
    """Returns the seconds of the units of a stage. pairs: their steps at sizes 1 and 2."""
    late, longest = np.zeros((2, 2, len(works.none))), works.none
    busy: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: works.none)
    for (count, small), (_, large) in pairs:
        for number, (first, second) in enumerate(zip(small, large, strict=True)):
            played = _Pass(works)
            played.play(first, second)
            late[number] += count * np.maximum(played.late, 0.0)
            for stream, seconds in played.busy.items():
                busy[stream, number] = busy[stream, number] + count * seconds
            if number == FORWARD:
                longest = np.maximum(longest, played.longest)
    return KindTimes(late, busy, longest)


class _Pass:
    """A pass of a unit, from whose begin on two things count, in turn: the kernels before it, and what the host does
    before it.

    busy: seconds of the works on each stream [sizes] [s].
    longest: kernel [sizes] [s].
    """

    def __init__(self, works: _StepWorks) -> None:
        self.works, self.longest = works, works.none
        self.busy: dict[str, np.ndarray] = defaultdict(lambda: works.none)
        self._results: list[np.ndarray] = []
        self._moved: dict[object, np.ndarray] = {}
        self._never = np.full((2, len(works.none)), NEVER)
        self._end, self._host = self._never.copy(), self._never.copy()
        """When the last kernel ends, and the host is done, after each of both begins [2, sizes] [s]."""
        self._end[0] = self._host[1] = 0.0

    @property
    def late(self) -> np.ndarray:
        """By how much it puts off the compute stream and the host [2, sizes] [s]."""
        return np.stack([self._end[0], self._host[1]])

    def play(self, small: Sequence[Step], large: Sequence[Step]) -> None:
        """Plays its steps. small, large: at sizes 1 and 2."""
        check_affine(len(small) == len(large))
        for first, second in zip(small, large, strict=True):
            check_affine(len(first.waits) == len(second.waits) and len(first.works) == len(second.works))
            ready = self._never
            for wait, other in zip(first.waits, second.waits, strict=True):
                check_affine(wait.step == other.step and len(wait.collectives) == len(other.collectives))
                ready = np.maximum(ready, self._move(wait, other))
            for placed, same in zip(first.works, second.works, strict=True):
                ready = self._run(placed, same, first.phase, ready)
            self._results.append(ready)

    def _move(self, first: Wait, second: Wait) -> np.ndarray:
        """Returns when the result of an earlier step has come to where it is waited for [2, sizes] [s]."""
        came, before = self._results[first.step], self._moved.get(first.key)
        for placed, other in zip(first.collectives, second.collectives, strict=True):
            if before is None:
                came = self._run(placed, other, "", came)
            elif not self.works.is_hidden(placed.stream):
                came = came + self.works.of_collective(placed.work, other.work)
        if first.collectives:
            self._moved[first.key] = came = came if before is None else np.maximum(came, before)
        return came

    def _run(self, placed: PlacedWork, other: PlacedWork, phase: str, ready: np.ndarray) -> np.ndarray:
        """Runs a piece of work whose inputs are there; returns when its result is there [2, sizes] [s]."""
        works, (stream, work, launches) = self.works, placed
        check_affine(launches == other.launches)
        self._launch(launches)
        if works.is_hidden(stream):
            return ready
        if stream != COMPUTE or isinstance(work, Collective):
            seconds = works.of_collective(work, other.work)
            ready = np.maximum(ready, self._host) + seconds
        else:
            seconds = works.of_kernel(work, other.work, phase)
            begin = np.maximum(ready, self._end)
            # The host launches the parts of a kernel that is cut one after another.
            begin = begin if works.may_cut(work, phase) else np.maximum(begin, self._host)
            self._end = ready = begin + seconds
            self.longest = np.maximum(self.longest, seconds)
            if isinstance(work, Memory) and work.what == ROUTER in works.waits and not work.backward and phase == "F":
                self._host = np.maximum(self._host, ready)
        self.busy[stream] = self.busy[stream] + seconds
        return ready

    def _launch(self, launches: float) -> None:
        if launches and self.works.launch:
            self._host = self._host + launches * self.works.launch
            if self.works.waits:
                self.busy[HOST_STREAM] = self.busy[HOST_STREAM] + launches * self.works.launch


def _to_times(of_layer: np.ndarray, kinds: Sequence[KindTimes], sizes: Sequence[int]) -> LeastTimes:
    """Returns durations as `StageTimes`, in which backward passes are whole, and nothing is known of their ends."""
    others = {stream for kind in kinds for stream, _ in kind.busy} - {COMPUTE, HOST_STREAM}
    streams = [COMPUTE, *sorted(others), HOST_STREAM]
    busy = np.zeros((len(sizes), len(kinds), len(PASSES), len(streams)))
    late = np.zeros((len(sizes), len(kinds), len(PASSES), 2))
    for number, kind in enumerate(kinds):
        for at, action in enumerate((FORWARD, WHOLE)):
            late[:, number, action] = kind.late[at].T
        for (stream, at), seconds in kind.busy.items():
            busy[:, number, (FORWARD, WHOLE)[at], streams.index(stream)] = seconds
    # Both halves of a backward pass take no less than a whole one.
    late[:, :, WEIGHTS], busy[:, :, WEIGHTS] = late[:, :, WHOLE], busy[:, :, WHOLE]
    put_off = busy.copy()
    put_off[..., [0, -1]] = late
    nothing = np.zeros(busy.shape[1:])
    times = {
        size: StageTimes(put_off[i], busy[i], nothing[..., 0], nothing, nothing, 0.0) for i, size in enumerate(sizes)
    }
    longest = {size: np.array([kind.longest[i] for kind in kinds]) for i, size in enumerate(sizes)}
    return LeastTimes(of_layer, times, longest)
