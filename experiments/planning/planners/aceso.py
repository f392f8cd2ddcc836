"""Aceso: iterative relief of the bottleneck stage, by trades of GPUs, layers, degrees and recomputation.

The bottleneck is the stage that lacks most memory, or else the slowest. Primitives, each with a sign for the seconds,
the memory and the collectives of the bottleneck, change it at the cost of partners; a degree is doubled or halved. The
objective is the sum of the stages' seconds and m - 1 times the slowest, as Alpa's. For every number of stages the
search starts from a balanced plan (Liu et al. 2024, "Aceso: Efficient Parallel DNN Training through Iterative
Bottleneck Alleviation", EuroSys 2024; microsoft/SuperScaler, `search/`). In the paper operators are cut, recomputed and
sharded singly. On a profile of operators they are cut and recomputed so here, too; in a job layers are cut, and a stage
recomputes all or nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked, Shape, StageState, pass_layers
from meshcast.experiments.planning.cores.stage_dp import plan_stages
from meshcast.experiments.planning.planner import Planner, Proposal, SpaceOptimum, write_stages
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.experiments.planning.stages import PlannedStage, StageTable
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

HOPS = 7
"""Primitives that a trial may apply in sequence."""

KEPT = 1.2
"""Plans of at most so many times the best seconds are kept, to start from later."""

GOALS = (0.4, 0.2, 0.0)
"""Shares of the gap to a partner that layers moved there leave."""

FORWARD, BACKWARD, INPUT, OUTPUT, WEIGHTS, ACTIVATIONS, RESERVED_FORWARD, RESERVED_BACKWARD = range(8)
"""Columns of a profile of operators: seconds, then MiB."""

STATES = 8
"""Weights, gradients, main weights and moments, as often as the bytes of weights."""

State = tuple[StageState, ...]


class Aceso(Planner):
    paper = Paper(
        "EuroSys 2024", "Aceso: Efficient Parallel DNN Training through Iterative Bottleneck Alleviation", 2024
    )
    restrictions = (
        "change the size of micro-batches of a job, or on the way",
        "cut or recompute a part of a layer of a job",
        "give operators of a stage degrees of their own",
        "leave GPUs unused",
    )

    modes = ("paper", "ours")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return (self._plan_operators if problem.mode == "paper" else self._plan_layers)(problem, budget)

    def _plan_operators(self, problem: Problem, budget: SearchBudget) -> Proposal:
        settings = settings_of(problem)
        if missing := [key for key in ("tables", "repeat", "micro_batches", "batch") if key not in settings]:
            rule = f"Aceso needs times of operators by degree and size of micro-batches, and there is no `{missing[0]}`"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of Aceso's operators")
        profile, most = OperatorProfile(settings, problem.memory / 2**20), max(1, budget.steps // 10)
        walks = [
            OperatorWalk(profile, problem.gpus, settings["batch"], size, most) for size in settings["micro_batches"]
        ]
        plans = [(walk, state) for walk in walks if (state := walk.run()) is not None]
        if not plans:
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory")
        walk, state = min(plans, key=lambda plan: plan[0].price(plan[1]).value)
        plan = {"stages": walk.write_stages(state), "micro_batch": walk.micro}
        reason = "its stages cut and recompute parts of layers"
        return Proposal(plan, walk.price(state).value, walk.visited, None, reason)

    def _plan_layers(self, problem: Problem, budget: SearchBudget) -> Proposal:
        table = problem.stages()
        walk = LayerWalk(table, problem.gpus, problem.microbatches, max(1, budget.steps // 10))
        state = walk.run()
        if state is None:
            raise self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        return Proposal(write_stages(problem, table, walk.list_stages(state)), walk.price(state).value, walk.visited)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds by Alpa's dynamic program over the same stages: the objective is the same."""
        best = plan_stages(problem.stages(), problem.gpus, problem.microbatches)
        return SpaceOptimum(best.bound, "dynamic programming over stages") if best else None


# --------------------------------------------------------------------------------------------- the walk


class Primitive(NamedTuple):
    """A change of the bottleneck, with what it does to it: more (+1), less (-1) or the same (0).

    apply: the plans that it makes of a plan and the place of the bottleneck.
    """

    name: str
    seconds: int
    memory: int
    collectives: int
    apply: Callable[[State, int], Iterator[State]]


class PricedState(NamedTuple):
    """A plan with its stages' options, their seconds, what each lacks of memory, and the objective [s]."""

    options: tuple[int, ...]
    seconds: tuple[float, ...]
    lacking: tuple[int, ...]
    value: float

    @property
    def rank(self) -> tuple[int, float]:
        """Plans that fit first, the fastest first of all."""
        return max(self.lacking), self.value


class StageWalk(ABC):
    """The search, whatever prices the stages: for every number of stages in turn.

    Customise by: choose_option, split_seconds, layers_to_move.

    layers: their number.
    shapes: in which stages may use GPUs.
    gpus: all of them are used.
    most: plans priced for a number of stages.
    """

    def __init__(self, layers: int, shapes: Collection[Shape], gpus: int, microbatches: int, most: int) -> None:
        self.layers, self.shapes, self.gpus, self.microbatches, self.most = layers, shapes, gpus, microbatches, most
        self._limit = 0
        self.known: dict[State, PricedState] = {}
        self.primitives = (
            Primitive("move layers", -1, -1, 0, self._move_layers),
            Primitive("more replicas", -1, -1, 1, lambda state, at: self._resize(state, at, "data", True)),
            Primitive("more tensor parallelism", -1, -1, 1, lambda state, at: self._resize(state, at, "tensor", True)),
            Primitive("fewer replicas", 1, 1, -1, lambda state, at: self._resize(state, at, "data", False)),
            Primitive("less tensor parallelism", 1, 1, -1, lambda state, at: self._resize(state, at, "tensor", False)),
            Primitive("replicas for tensor parallelism", 0, 1, -1, lambda state, at: self._trade(state, at, "data")),
            Primitive("tensor parallelism for replicas", 0, -1, 1, lambda state, at: self._trade(state, at, "tensor")),
        )

    @abstractmethod
    def choose_option(self, stage: StageState, behind: int) -> tuple[int, float, int]:
        """Returns what a stage lacks of memory before `behind` others (0: it fits), its seconds and its option."""

    @abstractmethod
    def split_seconds(self, stage: StageState, seconds: float) -> tuple[float, float, float]:
        """Returns the seconds of a stage for its work alone, lost to small kernels and collectives, and recomputing."""

    @abstractmethod
    def layers_to_move(self, stage: StageState, behind: int, step: int, wanted: float) -> int:
        """Returns the fewest layers without which a stage fits and takes at most `wanted` seconds; 1 if none are
        enough, 0 for a stage of 1 layer. step: 1 if they leave at its end, -1 at its begin."""

    @property
    def visited(self) -> int:
        return len(self.known)

    def price(self, state: State) -> PricedState:
        """Returns the price of a plan; every stage recomputes only if it must, as its fastest option that fits does."""
        if state not in self.known:
            chosen = [self.choose_option(stage, len(state) - 1 - place) for place, stage in enumerate(state)]
            lacking, seconds, options = zip(*chosen, strict=True)
            value = sum(seconds) + (self.microbatches - 1) * max(seconds)
            self.known[state] = PricedState(options, seconds, lacking, value)
        return self.known[state]

    def run(self) -> State | None:
        """Returns the best plan of all numbers of stages; None if none that was met fits."""
        best: Ranked[State] | None = None
        for number in range(1, min(self.layers, self.gpus) + 1):
            if is_over() and best is not None and best.rank[0] <= 0:
                break
            start = self.start(number)
            if start is not None:
                self._limit = self.visited + self.most
                end = LocalSearch(lambda state: self.price(state).rank, self._relieve).run(start)
                best = end if best is None or end.rank < best.rank else best
        return best.state if best is not None and best.rank[0] <= 0 and math.isfinite(best.rank[1]) else None

    def start(self, number: int) -> State | None:
        """Returns equal numbers of layers, on GPUs by halving the largest stage; None if no shape has such GPUs."""
        sizes = [self.gpus]
        while len(sizes) < number:
            largest = max(sizes)
            if largest % 2:
                return None
            sizes.remove(largest)
            sizes += [largest // 2] * 2
        if not {*sizes} <= {shape.gpus for shape in self.shapes}:
            return None
        borders = [round(place * self.layers / number) for place in range(number + 1)]
        return tuple(
            self._choose_shape(StageState(borders[place], borders[place + 1], Shape(size, 0, 0)), number, place)
            for place, size in enumerate(sorted(sizes))
        )

    def _choose_shape(self, stage: StageState, number: int, place: int) -> StageState:
        tried = [stage._replace(shape=shape) for shape in self.shapes if shape.gpus == stage.shape.gpus]
        return min(tried, key=lambda other: self._rank_stage(other, number, place))

    def _rank_stage(self, stage: StageState, number: int, place: int) -> tuple[int, float]:
        return self.choose_option(stage, number - 1 - place)[:2]

    def _relieve(self, search: LocalSearch[State]) -> Iterator[Ranked[State]]:
        """Yields the plans of repeated trials; after a trial without a gain the best plan passed by is next."""
        passed: dict[State, float] = {}
        entered: set[State] = set()
        now = search.best.state
        while self.visited < self._limit and not is_over():
            before, better = search.best, self._hop(now, search.best.rank, 0, entered, passed)
            if better is not None:
                tuned = (self._choose_shape(stage, len(better), place) for place, stage in enumerate(better))
                yield search.price(tuple(tuned))
            now = search.best.state
            if search.best is before:
                limit = KEPT * before.rank[1]
                left = [state for state, value in passed.items() if state not in entered and value <= limit]
                if not left:
                    return
                now = min(left, key=lambda state: self.price(state).rank)

    def _hop(
        self, state: State, best: tuple[int, float], depth: int, entered: set[State], passed: dict[State, float]
    ) -> State | None:
        """Returns a plan of a better rank, at most `HOPS` primitives away; None if there is none.

        Groups of primitives are tried in order; if no plan of a group is better, the search goes on from them.
        """
        if depth == HOPS or self.visited >= self._limit or is_over():
            return None
        entered.add(state)
        priced = self.price(state)
        order = priced.lacking if max(priced.lacking) else priced.seconds
        at = max(range(len(state)), key=lambda place: order[place])
        for group in self.groups(state, at):
            changed = [other for primitive in group for other in primitive.apply(state, at) if other not in entered]
            passed |= {other: self.price(other).value for other in changed}
            changed.sort(key=lambda other: self.price(other).rank)
            if changed and self.price(changed[0]).rank < best:
                return changed[0]
            for other in changed:
                better = None if other in entered else self._hop(other, best, depth + 1, entered, passed)
                if better is not None:
                    return better
        return None

    def groups(self, state: State, at: int) -> list[list[Primitive]]:
        """Returns the primitives by what makes a bottleneck slow: work, lost efficiency, or recomputation."""
        priced = self.price(state)
        if max(priced.lacking):
            return [[primitive for primitive in self.primitives if primitive.memory < 0]]
        parts = np.array([self.split_seconds(*pair) for pair in zip(state, priced.seconds, strict=True)])
        totals = parts.sum(axis=0)
        shares = np.divide(parts[at], totals, out=np.zeros(3), where=totals > 0)
        left = list(self.primitives)
        groups = []
        for kind in np.argsort(-shares, kind="stable"):
            sign = ("seconds", "collectives", "memory")[kind]
            first = [primitive for primitive in left if getattr(primitive, sign) < 0]
            if parts[at][2] > 0 and kind != 2:  # a stage that recomputes should not need more memory
                first = [primitive for primitive in first if primitive.memory <= 0]
            groups.append(first)
            left = [primitive for primitive in left if primitive not in first]
        return [group for group in (*groups, left) if group]

    def _move_layers(self, state: State, at: int) -> Iterator[State]:
        """Moves layers to a partner, the stage of least seconds first; stages in between pass them on."""
        seconds = self.price(state).seconds
        for partner in sorted((place for place in range(len(state)) if place != at), key=lambda place: seconds[place]):
            for goal in GOALS:
                wanted = seconds[at] - (seconds[at] - seconds[partner]) * (1 - goal)

                def count(stage: StageState, place: int, wanted: float = wanted, partner: int = partner) -> int:
                    return self.layers_to_move(stage, len(state) - 1 - place, 1 if partner > at else -1, wanted)

                moved = pass_layers(state, at, partner, count)
                if moved != state:
                    yield moved

    def _scale(self, shape: Shape, degree: str, up: bool) -> Shape | None:
        """Returns a shape with twice or half a degree, and GPUs; None if no option has it."""
        size = getattr(shape, degree)
        if not up and size % 2:
            return None
        new, gpus = (size * 2, shape.gpus * 2) if up else (size // 2, shape.gpus // 2)
        changed = shape._replace(**{degree: new, "gpus": gpus})
        return changed if changed in self.shapes else None

    def _resize(self, state: State, at: int, degree: str, up: bool) -> Iterator[State]:
        """Doubles or halves a degree of the bottleneck; partners do the opposite until as many GPUs have moved."""
        shape = self._scale(state[at].shape, degree, up)
        if shape is None:
            return
        moved, changed = list(state), {at}
        moved[at] = state[at]._replace(shape=shape)
        left = abs(shape.gpus - state[at].shape.gpus)
        while left:
            partners = [
                (self._rank_stage(stage._replace(shape=other), len(state), place), place, other)
                for place, stage in enumerate(moved)
                if place not in changed
                for kind in ("tensor", "data")
                if (other := self._scale(stage.shape, kind, not up)) is not None
                and abs(other.gpus - stage.shape.gpus) <= left
            ]
            if not partners:
                return
            _, place, other = min(partners)
            left -= abs(other.gpus - moved[place].shape.gpus)
            moved[place] = moved[place]._replace(shape=other)
            changed.add(place)
        yield tuple(moved)

    def _trade(self, state: State, at: int, degree: str) -> Iterator[State]:
        """Doubles a degree of the bottleneck and halves the other."""
        shape = state[at].shape
        other = {"tensor": "data", "data": "tensor"}[degree]
        if getattr(shape, other) % 2 == 0:
            traded = shape._replace(**{degree: getattr(shape, degree) * 2, other: getattr(shape, other) // 2})
            if traded in self.shapes:
                yield (*state[:at], state[at]._replace(shape=traded), *state[at + 1 :])


class LayerWalk(StageWalk):
    """The walk over the stages of a table."""

    def __init__(self, table: StageTable, gpus: int, microbatches: int, most: int) -> None:
        self.table = table
        self.options: dict[Shape, list[int]] = {}
        for number, option in enumerate(table.options):
            tensor = int(option.plan.get("tp", 1))
            shape = Shape(option.gpus, tensor, int(option.plan.get("dp", option.gpus // tensor)))
            self.options.setdefault(shape, []).append(number)
        self.work = (table.seconds * np.array([option.gpus for option in table.options])).min(axis=-1)
        super().__init__(table.layers, self.options, gpus, microbatches, most)

    def list_stages(self, state: State) -> tuple[PlannedStage, ...]:
        """Lists the stages of a plan with the options that they have."""
        options = self.price(state).options
        pairs = zip(state, options, strict=True)
        return tuple(PlannedStage(range(stage.first, stage.stop), option) for stage, option in pairs)

    def choose_option(self, stage: StageState, behind: int) -> tuple[int, float, int]:
        """Returns micro-batches that do not fit, seconds and option of a stage before `behind` others."""
        cells = [(stage.first, stage.stop - 1, option) for option in self.options[stage.shape]]
        return min(
            (max(0, behind - int(self.table.behind[cell])), float(self.table.seconds[cell]), cell[2]) for cell in cells
        )

    def split_seconds(self, stage: StageState, seconds: float) -> tuple[float, float, float]:
        first, last = stage.first, stage.stop - 1
        ideal = float(self.work[first, last]) / stage.shape.gpus
        plain = min(float(self.table.seconds[first, last, option]) for option in self.options[stage.shape])
        return ideal, max(0.0, plain - ideal), max(0.0, seconds - plain)

    def layers_to_move(self, stage: StageState, behind: int, step: int, wanted: float) -> int:
        first, last, options = stage.first, stage.stop - 1, self.options[stage.shape]
        both = self.table.seconds, self.table.behind
        if step > 0:  # what is left: the ranges from `first` on, by their last layer
            seconds, most = (array[first, first:last][:, options] for array in both)
        else:  # the ranges that end with `last`, by their first layer
            seconds, most = (array[first + 1 : last + 1, last][:, options] for array in both)
        enough = np.flatnonzero(((most >= behind) & (seconds <= wanted)).any(axis=1))
        if len(enough):
            return int(last - first - enough[-1] if step > 0 else enough[0] + 1)
        return min(1, stage.stop - stage.first - 1)


# ------------------------------------------------------------------------------------ profiles of operators


class PricedStage(NamedTuple):
    """A stage: seconds of a micro-batch, of these of recomputation, memory [MiB], and what is recomputed."""

    seconds: float
    again: float
    memory: float
    recomputed: tuple[bool, ...]


class OperatorProfile:
    """A profile of operators in the order of their execution.

    A stage is a range of operators with a single degree of tensor and of data parallelism. Its seconds are those of all
    passes, of the operators that it recomputes once more, and of its input and output over the link. Its memory is

        8 W + behind A + (A + largest recomputed segment) + max(largest reserves of both passes, W)

    with W the weights (a gradient, main weights and moments of 1, 2 and 4 times as many bytes) and A its input and the
    activations that it keeps, for each of `behind` further micro-batches in flight. If it does not fit, kinds of
    operators are recomputed in turn, those of most bytes first, of the last kind as many as needed
    (`search/aceso_cost_model.py`).

    names: kinds of operators.
    tables: by tensor parallelism and samples of a rank's micro-batch [operators, columns].
    speeds: of a link by the logarithm of a message's MiB [MiB/s].
    memory: of a GPU [MiB].
    counted: the share of a kind's activations that takes memory of its operator.
    merged: kinds without any.
    split: kinds with a part.
    heads: kinds at which a segment of recomputation ends.
    whole: kinds that are never recomputed.
    """

    def __init__(self, settings: Mapping[str, Any], memory: float) -> None:
        """settings: of the file of a profile."""
        begin, end, times = (int(settings["repeat"][key]) for key in ("first", "last", "times"))
        kinds = [row[0] for row in settings["operators"]]
        places = [*range(begin), *[*range(begin, end + 1)] * times, *range(end + 1, len(kinds))]
        self.names = [kinds[place] for place in places]
        scale = np.array([1e-6, 1e-6, 1, 1, 1, 1, 1, 1])
        self.tables = {
            (int(row["tp"]), int(row["samples"])): np.array(row["figures"], float)[places] * scale
            for row in settings["tables"]
        }
        self.speeds = [1000 * float(speed) for speed in settings["link_speeds"]]
        self.memory = memory
        shared = settings["shared_activations"]
        self.counted = np.array([float(shared.get(name, 1.0)) for name in self.names])
        self.merged = np.array([shared.get(name, 1.0) == 0.0 for name in self.names])
        self.split = np.array([name in shared and shared[name] > 0.0 for name in self.names])
        self.heads = np.array([name in settings["segment_heads"] for name in self.names])
        self.whole = {*settings["never_recomputed"], *settings["segment_heads"]}

    def price(self, stage: StageState, micro: int, behind: int) -> PricedStage:
        """Prices the stage with as little recomputation as it needs, or with all if it does not fit."""
        table = self.tables[stage.shape.tensor, micro // stage.shape.data][stage.first : stage.stop]
        again = self._recompute(table, stage, behind)
        memory = self._memory(table, stage, behind, again)
        extra = float(table[again, FORWARD].sum())
        links = sum(self._transfer(float(size)) for size in (table[0, INPUT], table[-1, OUTPUT]))
        seconds = float(table[:, FORWARD].sum() + table[:, BACKWARD].sum()) + links + extra
        return PricedStage(seconds, extra, memory, tuple(again.tolist()))

    def _transfer(self, size: float) -> float:
        """Returns the seconds of a message of some MiB."""
        if size <= 0:
            return 0.0
        power = int(math.log2(size))
        return size / self.speeds[min(power - (power >= 1), len(self.speeds) - 1)]

    def _memory(self, table: np.ndarray, stage: StageState, behind: int, again: np.ndarray) -> float:
        weights = float(table[:, WEIGHTS].sum())
        counted = table[:, ACTIVATIONS] * self.counted[stage.first : stage.stop]
        freed, segment = self._count_freed(table, stage, again)
        kept = float(table[0, INPUT] + counted.sum()) - freed
        reserves = [float(table[:-1, column].max(initial=0.0)) for column in (RESERVED_FORWARD, RESERVED_BACKWARD)]
        return STATES * weights + behind * kept + kept + segment + max(sum(reserves), weights)

    def _count_freed(self, table: np.ndarray, stage: StageState, again: np.ndarray) -> tuple[float, float]:
        """Returns MiB of activations that recomputation frees, and the largest segment that is made again."""
        pairs = again[:-1] & again[1:]
        if not pairs.any():
            return 0.0, 0.0
        inner = slice(stage.first, stage.stop - 1)
        sizes = table[:-1, ACTIVATIONS] * self.counted[inner]
        alone = ~self.merged[inner] & ~self.split[inner]
        heads = self.heads[stage.first + 1 : stage.stop]
        freed = float(sizes[pairs & ~(heads & alone)].sum())
        ends = (heads | (np.arange(len(pairs)) == len(pairs) - 1)) & alone
        largest, segment = 0.0, 0.0
        for place, pair in enumerate(pairs):
            if pair:
                segment += float(sizes[place])
            if not pair or ends[place]:
                largest, segment = max(largest, segment), 0.0
        return freed, largest

    def _recompute(self, table: np.ndarray, stage: StageState, behind: int) -> np.ndarray:
        """Returns what a stage recomputes, so that it just fits."""
        again = np.zeros(stage.stop - stage.first, bool)
        excess = self._memory(table, stage, behind, again) - self.memory
        groups: dict[str, list[int]] = {}
        for place in range(len(again)):
            groups.setdefault(self.names[stage.first + place], []).append(place)
        sizes = table[:, ACTIVATIONS] * (behind + 1)
        left = {name: float(sizes[places].sum()) for name, places in groups.items() if name not in self.whole}
        freed = segment = 0.0
        while excess > 0 and left:
            kind = max(left, key=lambda name: left[name])
            total, places = left.pop(kind), groups[kind]
            if total <= 0 or places[0] + 1 >= len(again):
                break
            left.pop(self.names[stage.first + places[0] + 1], None)
            if total >= excess:
                enough = np.flatnonzero(np.cumsum(sizes[places]) > excess)
                places = places[: int(enough[0]) + 1] if len(enough) else places
            for place in places:
                again[place : place + 2] = True
            now = self._count_freed(table, stage, again)
            excess += (now[1] - segment) - (now[0] - freed) * (behind + 1)
            freed, segment = now
        return again


class OperatorWalk(StageWalk):
    """The walk over the stages of a profile, with micro-batches of `micro` samples."""

    def __init__(self, profile: OperatorProfile, gpus: int, batch: int, micro: int, most: int) -> None:
        self.profile, self.micro = profile, micro
        degrees = sorted({tensor for tensor, _ in profile.tables})
        sizes = [(tensor, data) for tensor in degrees for data in range(1, gpus + 1) if micro % data == 0]
        shapes = [
            Shape(tensor * data, tensor, data)
            for tensor, data in sizes
            if tensor * data <= gpus and (tensor, micro // data) in profile.tables
        ]
        self._priced: dict[tuple[StageState, int], PricedStage] = {}
        self._again: dict[StageState, float] = {}
        super().__init__(len(profile.names), shapes, gpus, batch // micro, most)

    def price_stage(self, stage: StageState, behind: int) -> PricedStage:
        key = stage, behind
        if key not in self._priced:
            self._priced[key] = self.profile.price(stage, self.micro, behind)
            self._again[stage] = min(self._priced[key].again, self._again.get(stage, math.inf))
        return self._priced[key]

    def write_stages(self, state: State) -> list[dict[str, Any]]:
        """Returns the operators of every stage, its degrees, and what it recomputes."""
        stages = []
        for place, stage in enumerate(state):
            again = self.price_stage(stage, len(state) - 1 - place).recomputed
            recomputed = [stage.first + at for at, chosen in enumerate(again) if chosen]
            degrees = {"tp": stage.shape.tensor, "dp": stage.shape.data}
            stages.append({"nodes": [*range(stage.first, stage.stop)], **degrees, "recomputed": recomputed})
        return stages

    def choose_option(self, stage: StageState, behind: int) -> tuple[int, float, int]:
        """Returns MiB that a stage lacks, its seconds, and the place of its shape."""
        priced = self.price_stage(stage, behind)
        lacking = math.ceil(max(0.0, priced.memory - self.profile.memory))
        return lacking, priced.seconds, [*self.shapes].index(stage.shape)

    def split_seconds(self, stage: StageState, seconds: float) -> tuple[float, float, float]:
        again = self._again.get(stage, 0.0)
        whole = self.profile.tables.get((1, self.micro))
        operators = slice(stage.first, stage.stop)
        ideal = float(whole[operators, :2].sum()) / stage.shape.gpus if whole is not None else seconds - again
        return ideal, max(0.0, seconds - again - ideal), again

    def layers_to_move(self, stage: StageState, behind: int, step: int, wanted: float) -> int:
        """Finds the number by bisection: memory and seconds shrink with the stage, or nearly so."""

        def is_enough(count: int) -> bool:
            left = stage._replace(stop=stage.stop - count) if step > 0 else stage._replace(first=stage.first + count)
            lacking, seconds, _ = self.choose_option(left, behind)
            return lacking == 0 and seconds <= wanted

        low, high = 1, stage.stop - stage.first - 1
        if high < 1:
            return 0
        if not is_enough(high):
            return 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
        return low
