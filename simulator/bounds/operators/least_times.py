"""Least durations of the passes of every kind of unit of a plan, at several sizes of micro-batches, from the works of
its operators.

A pass puts off the compute stream by its kernels in turn, and by the collectives between two of them that nothing else
hides: each step begins after the steps before it on the stream, and after the results that it waits for. On streams of
collectives these run in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshcast.hardware.remembered import remember
from meshcast.simulator.bounds.collectives import LARGE
from meshcast.simulator.bounds.micro_batches import NotAffine, ScaledWorks, check_affine
from meshcast.simulator.bounds.operators.unit_steps import (
    OperatorWorks,
    PassSteps,
    PlacedWork,
    UnitSteps,
    UnitWork,
    Wait,
)
from meshcast.simulator.bounds.schedule_bound import FORWARD, PASSES, WEIGHTS, WHOLE, StageTimes
from meshcast.simulator.bounds.unit_prices import list_unit_stages, price_new_gradients
from meshcast.simulator.engine.maxplus import NEVER
from meshcast.simulator.forecast.lowering import lowering_traits, make_lowering
from meshcast.simulator.forecast.program import host_launch_seconds
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.modules import BatchLossUnit, MoE, Stage, every_module
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Gemm, HostLaunch, Memory, Op, Work
from meshcast.simulator.ir.scheme import Scheme, TensorScheme
from meshcast.simulator.lowering.lower import HOST_STREAM
from meshcast.simulator.lowering.rewrite import Rewrite
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.schemes.data.shared.data_parallel import DataScheme
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme
from meshcast.simulator.schemes.expert.shared.shared_expert_overlap import OverlapsSharedExperts
from meshcast.simulator.schemes.pipeline.shared.weight_gradients import PutsOffWeightGradients
from meshcast.simulator.schemes.sequence.shared.skewed_attention import SkewedAttention
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import GemmCollective, TensorOverlap

MOVES_OPS: Mapping[type[Scheme], tuple[str, ...]] = {
    PutsOffWeightGradients: ("delay_weight_gradients", "deferred_output_gradients"),
    OverlapsSharedExperts: ("overlap_shared",),
}
"""Options with which schemes issue ops in another order."""

ADD_OPS = (
    *(Scheme.lower, DataScheme.lower, ExpertScheme.lower, TensorOverlap.lower, SkewedAttention.lower),
    *(kind.lower for kind in MOVES_OPS),
)
"""What lowers modules under schemes that change no kernels but those of experts with uneven loads, attention that only
takes longer, and GEMMs that are cut to overlap their collectives; without options that move ops."""

ADD_OPS_TO_STAGES = (Scheme.lower_stage, DataScheme.lower_stage, ExpertScheme.lower_stage)

ROUTER = "router"
"""The kernel after which a host that waits for it goes on."""

FREE, LAUNCHED, ENTERED = range(3)
"""What times of a pass count from: the compute stream is free, the host begins, the input is there."""


Units = tuple[list[Stage], np.ndarray]
"""Each kind of unit of a plan alone in a stage, and the kind of every layer."""


class LeastTimes(NamedTuple):
    """Least durations of the passes of every kind of unit.

    of_layer: the kind of every layer.
    times, longest: by size of a micro-batch, the durations, and the longest kernel of the forward pass of every kind
        [kinds] [s].
    saved: by size, what the forward pass of every kind leaves, with nothing and with attention recomputed [2, kinds]
        [bytes].
    """

    of_layer: np.ndarray
    times: dict[int, StageTimes]
    longest: dict[int, np.ndarray]
    saved: dict[int, np.ndarray]

    @property
    def kinds(self) -> int:
        """Number of kinds of units."""
        return next(iter(self.saved.values())).shape[1]


class KnownTimes:
    """What is known of plans that differ in their degrees.

    sizes: of micro-batches, for which durations are computed at once.
    kernels: prices of kernels at these sizes, by the traits of a framework and how its GEMMs write gradients.
    works: of operators outside of views of the mesh.
    kinds: durations of units of such operators alone.
    cut: seconds of GEMMs that may be cut.
    larger: units of micro-batches of two sequences, by the architecture of those of one.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.kernels: dict[Hashable, ScaledWorks] = {}
        self.works: dict[Hashable, OperatorWorks] = {}
        self.kinds: dict[Hashable, KindTimes] = {}
        self.cut: dict[Hashable, dict[Hashable, np.ndarray]] = {}
        self.larger: dict[Architecture, Units | None] = {}


def least_times(
    plan: Plan,
    larger: Callable[[], Plan | None],
    known: KnownTimes,
    degrees: Hashable,
    shared: SharedWork,
    out_of_place: bool,
) -> LeastTimes | None:
    """Returns the least durations of the passes of every kind of unit; None if lowering may change their works, or if
    these are not affine in the size of a micro-batch.

    plan: with micro-batches of one sequence. larger: makes it with micro-batches of two.
    known: of other plans; what is new is added.
    degrees: what the layouts of operators outside of views of the mesh follow from.
    out_of_place: GEMMs add weight gradients to none.
    """
    units = list_unit_stages(plan)

    def list_larger() -> Units | None:
        return list_unit_stages(other) if (other := larger()) is not None else None

    others = remember(known.larger, plan.model_parts.architecture, list_larger)
    if others is None or not _only_adds(plan, units[0]):
        return None
    works, scope = _StepWorks(plan, known, shared, out_of_place), make_lowering(plan).scope
    steps = UnitSteps(scope, known.works, degrees)

    def find(one: Stage, two: Stage) -> KindTimes:
        def make() -> KindTimes:
            pairs = zip(one.units, two.units, strict=True)
            return _of_kind(works, [(a.count, steps.list_work(a), steps.list_work(b)) for a, b in pairs])

        if any(operator.view for unit in one.units for operator in unit.operators()):
            return make()
        return remember(known.kinds, (degrees, *one.units), make)

    try:
        check_affine(np.array_equal(units[1], others[1]))
        kinds = [find(*stages) for stages in zip(units[0], others[0], strict=True)]
    except NotAffine:
        return None
    return _to_times(units[1], kinds, known.sizes)


def _only_adds(plan: Plan, stages: Sequence[Stage]) -> bool:
    """Returns whether lowering only adds to the works of the operators of a plan."""
    adds = all(type(s).lower in ADD_OPS and type(s).lower_stage in ADD_OPS_TO_STAGES for s in plan.schemes)
    moving = (
        (s, option) for s in plan.schemes for kind in MOVES_OPS if isinstance(s, kind) for option in MOVES_OPS[kind]
    )
    adds = adds and all(
        (value := getattr(scheme.options, option)) is False or value is None for scheme, option in moving
    )
    experts = [scheme for scheme in plan.schemes if isinstance(scheme, ExpertScheme)]
    layers = [part for stage in stages for part in every_module(stage) if isinstance(part, MoE)] if experts else []
    even = not any(scheme.marks_of(layer) for scheme in experts for layer in layers)
    return adds and even and not any(isinstance(unit, BatchLossUnit) for stage in stages for unit in stage.units)


class _StepWorks:
    """Seconds of works of a plan at several sizes of micro-batches."""

    def __init__(self, plan: Plan, known: KnownTimes, shared: SharedWork, out_of_place: bool) -> None:
        self._price, framework = shared.device_costs(plan)[0].estimate, plan.job.framework
        of_kernel = price_new_gradients(self._price, framework.weights) if out_of_place else self._price
        traits = framework.kernel_traits, out_of_place
        self._kernels = remember(known.kernels, traits, lambda: ScaledWorks(of_kernel, known.sizes))
        self._cut: dict[Hashable, np.ndarray] = remember(known.cut, traits, dict)
        self._more = np.array(known.sizes) - 1
        self._overlap = next((scheme for scheme in plan.schemes if isinstance(scheme, TensorOverlap)), None)
        tensor = (scheme for scheme in plan.schemes if isinstance(scheme, TensorScheme))
        self._axes = tuple(axis for scheme in tensor for axis in scheme.over)
        self._rates: dict[Work, float] = {}
        host = lowering_traits(plan).host
        self.waits = host.waits
        """Operations at which the host waits for the GPU."""
        launch = self._price(HostLaunch(1.0))[0] if host.waits else host_launch_seconds(plan)
        self.launch = 0.0 if host.graphed else launch
        """Time of the host to launch an op of the framework [s]."""
        self.none = np.zeros(len(known.sizes))

    def scale(self, small: Sequence[float], large: Sequence[float]) -> np.ndarray:
        """Returns figures at all sizes from those at sizes 1 and 2 [figures, sizes]."""
        first, second = np.array(small, float), np.array(large, float)
        return first[:, None] + np.outer(second - first, self._more)

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
        if not self.may_cut(small, phase):
            return self._kernels(small, large)[0]
        assert self._overlap is not None and isinstance(small, Gemm) and isinstance(large, Gemm)
        key = self._overlap.use, self._overlap.mesh.size(self._axes), phase, small, large
        return remember(self._cut, key, lambda: self._least_cut(small, large, phase))

    def _least_cut(self, small: Gemm, large: Gemm, phase: str) -> np.ndarray:
        """Returns the least seconds of a GEMM [sizes] [s], whole or cut."""
        assert self._overlap is not None
        seconds = self._kernels(small, large)[0]
        cuts = (_cut_product(self._overlap, self._axes, product, phase) for product in (small, large))
        for parts in zip(*cuts, strict=True):
            both = zip(*parts, strict=True)
            seconds = np.minimum(seconds, sum((self._kernels(a, b)[0] for a, b in both), self.none))
        return seconds


def _cut_product(overlap: TensorOverlap, axes: tuple[str, ...], product: Gemm, phase: str) -> list[list[Gemm]]:
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
    path: from the input of a pass to its result, forward and backward [2, sizes] [s].
    busy: of the works on each stream, by stream and pass [sizes] [s].
    longest: the longest kernel of the forward pass [sizes] [s].
    saved: as in `LeastTimes`, but for tensors at the ends of units [2, sizes] [bytes].
    ends: its input and its output [2, sizes] [bytes].
    """

    late: np.ndarray
    path: np.ndarray
    busy: dict[tuple[str, int], np.ndarray]
    longest: np.ndarray
    saved: np.ndarray
    ends: np.ndarray


def _of_kind(works: _StepWorks, units: Sequence[tuple[int, UnitWork, UnitWork]]) -> KindTimes:
    """Returns the seconds of the units of a stage. units: the number of equal ones, and their works at sizes 1 and
    2."""
    (late, path), longest = (np.zeros((2, *shape, len(works.none))) for shape in ((2,), ())), works.none
    busy: dict[tuple[str, int], np.ndarray] = defaultdict(lambda: works.none)
    for count, small, large in units:
        for number, (first, second) in enumerate(zip(small.passes, large.passes, strict=True)):
            played = _Pass(works)
            played.play(first, second)
            late[number] += count * np.maximum(played.late, 0.0)
            path[number] += count * np.maximum(played.path(first.results), 0.0)
            for stream, seconds in played.busy.items():
                busy[stream, number] = busy[stream, number] + count * seconds
            if number == FORWARD:
                longest = np.maximum(longest, played.longest)
    saved = sum((count * works.scale(small.saved, large.saved) for count, small, large in units), 0.0 * path)
    ends = [works.scale(small.ends, large.ends)[end] for end, (_, small, large) in enumerate((units[0], units[-1]))]
    return KindTimes(late, path, busy, longest, saved, np.stack(ends))


class _Pass:
    """A pass of a unit: when its steps are done after each of three things, in turn (`FREE` and what follows): the
    kernels before it, what the host does before it, and the arrival of its input.

    busy: seconds of the works on each stream [sizes] [s].
    longest: kernel [sizes] [s].
    """

    def __init__(self, works: _StepWorks) -> None:
        self.works, self.longest = works, works.none
        self.busy: dict[str, np.ndarray] = defaultdict(lambda: works.none)
        self._results: list[np.ndarray] = []
        self._moved: dict[object, np.ndarray] = {}
        self._never = np.full((3, len(works.none)), NEVER)
        self._end, self._host, self._entry = self._never.copy(), self._never.copy(), self._never.copy()
        """When the last kernel ends, the host is done, and the input is there, after each of three begins [3, sizes]
        [s]."""
        self._end[FREE] = self._host[LAUNCHED] = self._entry[ENTERED] = 0.0

    @property
    def late(self) -> np.ndarray:
        """By how much it puts off the compute stream and the host [2, sizes] [s]."""
        return np.stack([self._end[FREE], self._host[LAUNCHED]])

    def path(self, results: Sequence[int]) -> np.ndarray:
        """Returns the time from its input to its result [sizes] [s]. results: the numbers of the steps that make it."""
        return np.maximum.reduce([self._never[ENTERED], *(self._results[number][ENTERED] for number in results)])

    def play(self, small: PassSteps, large: PassSteps) -> None:
        """Plays its steps. small, large: at sizes 1 and 2."""
        check_affine(len(small.steps) == len(large.steps))
        came, waits = self._never, None
        for first, second in zip(small.steps, large.steps, strict=True):
            check_affine(len(first.waits) == len(second.waits) and len(first.works) == len(second.works))
            if first.waits is not waits:  # both gradients of an operator wait for the same
                came, waits = self._entry if first.enters else self._never, first.waits
                for wait, other in zip(first.waits, second.waits, strict=True):
                    check_affine(wait.step == other.step and len(wait.collectives) == len(other.collectives))
                    came = np.maximum(came, self._move(wait, other))
            ready = came
            for placed, same in zip(first.works, second.works, strict=True):
                ready = self._run(placed, same, first.phase, ready)
            self._results.append(ready)

    def _move(self, first: Wait, second: Wait) -> np.ndarray:
        """Returns when the result of an earlier step has come to where it is waited for [3, sizes] [s]."""
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
        """Runs a piece of work whose inputs are there; returns when its result is there [3, sizes] [s]."""
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
    """Returns durations as `StageTimes`, in which backward passes are whole, and nothing is known of what waits for the
    input of a pass, or makes its result."""
    others = {stream for kind in kinds for stream, _ in kind.busy} - {COMPUTE, HOST_STREAM}
    streams = [COMPUTE, *sorted(others), HOST_STREAM]
    busy = np.zeros((len(sizes), len(kinds), len(PASSES), len(streams)))
    late = np.zeros((len(sizes), len(kinds), len(PASSES), 2))
    path = np.zeros((len(sizes), len(kinds), len(PASSES)))
    for number, kind in enumerate(kinds):
        for at, action in enumerate((FORWARD, WHOLE)):
            late[:, number, action], path[:, number, action] = kind.late[at].T, kind.path[at]
        for (stream, at), seconds in kind.busy.items():
            busy[:, number, (FORWARD, WHOLE)[at], streams.index(stream)] = seconds
    # Both halves of a backward pass take no less than a whole one.
    late[:, :, WEIGHTS], busy[:, :, WEIGHTS] = late[:, :, WHOLE], busy[:, :, WHOLE]
    put_off = busy.copy()
    put_off[..., [0, -1]] = late
    nothing = np.zeros(busy.shape[1:])
    times = {size: StageTimes(put_off[i], busy[i], path[i], nothing, nothing, 0.0) for i, size in enumerate(sizes)}
    longest = {size: np.array([kind.longest[i] for kind in kinds]) for i, size in enumerate(sizes)}
    saved, ends = (np.stack([getattr(kind, name) for kind in kinds], axis=1) for name in ("saved", "ends"))
    # The input of a unit may be freed: no more than a layer gives on, but the last unit gives nothing.
    saved[:, -1] -= ends[0, -1]
    saved[:, 1:] += np.minimum(ends[0, 1:].min(axis=0) - ends[1, :-1].max(axis=0), 0.0)
    return LeastTimes(of_layer, times, longest, {size: saved[:, :, i] for i, size in enumerate(sizes)})
