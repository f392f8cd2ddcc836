"""The plans of a search of heterogeneous plans in blocks, each counted and bounded at once.

*Stages*: a single pipeline of runs of stages with different degrees. *Replicas*: a pipeline on every kind of nodes, or
two on equal nodes. *Equal degrees*: on several kinds of nodes, stages of equal degrees, whose replicas
share the batch evenly or by speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np

from meshcast.experiments.search.heterogeneous.open_fields import MAX_SEQUENCES_OF_A_RANK, HeterogeneousFields
from meshcast.experiments.search.heterogeneous.pipeline_bounds import (
    DeviceLines,
    OptionTable,
    PipelineMemory,
    ScheduleTable,
    bound_lines,
    bound_memory,
)
from meshcast.experiments.search.heterogeneous.stage_runs import (
    Runs,
    count_layers,
    divide_layers_of_runs,
    kinds_of_runs,
    layers_of_run,
    list_options,
    place_runs,
    split_rows,
)
from meshcast.experiments.search.heterogeneous.stage_units import RunOption, StageUnits
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered, remembered_by


class BlockBounds(NamedTuple):
    """Bounds of the plans of a block.

    seconds: of the step [plans] [s].
    nbytes: of the fullest GPU [plans] [bytes].
    valid: whether they break no rule that is known.
    fits: whether they may fit in memory [plans].
    """

    seconds: np.ndarray
    nbytes: np.ndarray
    valid: np.ndarray
    fits: np.ndarray


class PlanBlock(Protocol):
    """Some plans with equal micro-batches."""

    @property
    def size(self) -> int:
        """Number of plans."""

    def bound(self) -> BlockBounds:
        """Returns the bounds of all of them."""

    def changes(self, number: int) -> Fields:
        """Returns the fields of a plan, as a job states them but for the stages, of which equal ones share an entry."""

    def job(self, number: int) -> Fields:
        """Returns the job of a plan, as plain data."""

    def forget(self) -> None:
        """Drops what can be computed again: by default nothing."""
        return


class StepValues(NamedTuple):
    """Values that all stages of a plan have in common.

    micro: sequences of a micro-batch, on all ranks of a stage.
    """

    micro: int
    schedule: str
    zero: int


class BlockMaker:
    """Makes the blocks of a job, and keeps what several of them need.

    runs: most runs of a pipeline.
    """

    def __init__(self, fields: HeterogeneousFields, units: StageUnits, runs: int) -> None:
        self.fields, self.units, self.runs = fields, units, runs
        layers, gpus = fields.loaded.model.layers, fields.loaded.cluster.gpus
        most, framework = min(layers, gpus), fields.loaded.framework
        self.schedules = {name: ScheduleTable(name, most, framework) for name in fields.values.schedule}
        total = fields.loaded.batch.total
        assert total is not None
        self.total, self.layers = total, layers

    @remembered_by(lambda maker, micro, options: micro)
    def table(self, micro: int, options: Sequence[RunOption]) -> OptionTable:
        """Returns the units of all degrees with micro-batches of a size."""
        return OptionTable(self.units, options, micro)

    def blocks(self) -> Iterator[PlanBlock]:
        v = self.fields.values
        for micro in v.micro:
            options = list_options(self.fields, micro)
            placed = [
                place_runs(options, self.fields, kinds) for kinds in kinds_of_runs(len(self.fields.kinds), self.runs)
            ]
            pipelines = [*self._replicas(options)]
            equal = [*self._equal_degrees(micro)] if len(self.fields.kinds) > 1 else []
            for number, schedule in enumerate(v.schedule):
                for step in (StepValues(micro, schedule, zero) for zero in v.zero):
                    for option, stages in placed:
                        keep = (stages.sum(axis=1) > 1) | (number == 0)  # without a pipeline all schedules are equal
                        yield from self._stages(step, options, option[keep], stages[keep])
                    yield from (ReplicaBlock(self, step, options, *replicas, number == 0) for replicas in pipelines)
                    plans = [plan for plan in equal if plan.pp > 1 or number == 0]
                    if plans:
                        yield EqualDegreesBlock(self, step, plans)

    def _stages(
        self, step: StepValues, options: Sequence[RunOption], option: np.ndarray, stages: np.ndarray
    ) -> Iterator[PlanBlock]:
        counts = count_layers(option, stages, self.layers)
        for rows in split_rows(counts):
            if size := int(counts[rows].sum()):
                yield StageBlock(self, step, options, option[rows], stages[rows], size)

    def _replicas(self, options: Sequence[RunOption]) -> Iterator[tuple[list[Runs], tuple[float, ...], bool]]:
        """Yields the pipelines of every replica: their degrees and numbers of stages; the rates of the sums of their
        gradients [s/byte]; and whether their order matters."""
        kinds, pp = self.fields.kinds, self.fields.values.pp
        if len(kinds) > 1:
            sizes = [[kind.gpus for kind in kinds]]
        else:
            cluster = self.fields.loaded.cluster
            unit = cluster.gpus_per_node if cluster.gpus > cluster.gpus_per_node else 1
            gpus = cluster.gpus
            sizes = [[gpus - second, second] for second in range(unit, gpus // 2 + 1, unit) if gpus % unit == 0]
        for gpus_of_replicas in sizes:
            pipelines, offset = [], 0
            for number, gpus in enumerate(gpus_of_replicas):
                kind = number if len(kinds) > 1 else 0
                offset = 0 if len(kinds) > 1 else offset
                fitting = [
                    (i, gpus // candidate.gpus)
                    for i, candidate in enumerate(options)
                    if candidate.kind == kind and gpus % candidate.gpus == 0 and offset % candidate.tp == 0
                ]
                rows = [(i, p) for i, p in fitting if p <= self.layers and (pp is None or p in pp)]
                option, stages = np.array(rows, int).reshape(-1, 2).T[:, :, None]
                pipelines.append(Runs(option, stages, np.full_like(stages, self.layers)))
                offset += gpus
            if all(len(runs.option) for runs in pipelines):
                ordered = len(kinds) == 1 and gpus_of_replicas[0] == gpus_of_replicas[1]
                yield pipelines, self._sum_rates(tuple(gpus_of_replicas)), ordered

    @remembered
    def _sum_rates(self, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """Returns the least time of the sums of gradients on devices of every replica, by their GPUs [s/byte]."""
        borders, several = np.cumsum(sizes)[:-1].tolist(), len(self.fields.kinds) > 1
        return tuple(
            min(self.units.replica_sum_rate(i if several else 0, border) for border in borders)
            for i in range(len(sizes))
        )

    def _equal_degrees(self, micro: int) -> Iterator[EqualDegreesPlan]:
        v, gpus, kinds = self.fields.values, self.fields.loaded.cluster.gpus, self.fields.kinds
        for tp in v.tp:
            for pp in range(1, min(self.layers, gpus // tp) + 1):
                dp, rest = divmod(gpus, tp * pp)
                if rest or micro % dp or micro // dp > MAX_SEQUENCES_OF_A_RANK or self.layers % pp:
                    continue
                if any(kind.domain % tp for kind in kinds) or (v.pp is not None and pp not in v.pp):
                    continue
                if v.dp is not None and dp not in v.dp:
                    continue
                classes = self.classes_of_replicas(tp, pp, dp)
                shares = ("even", "by-speed") if len(classes) > 1 else ("even",)
                for ep in (ep for ep in v.ep if tp * dp % ep == 0):
                    yield from (
                        EqualDegreesPlan(tp, pp, dp, ep, recompute, share)
                        for recompute in v.recompute
                        for share in shares
                    )

    def kinds_at(self, begin: int, end: int) -> int:
        """Returns the kind of nodes of some ranks; the number of kinds if they are on several."""
        first, kinds = 0, set()
        for number, kind in enumerate(self.fields.kinds):
            if begin < first + kind.gpus and end > first:
                kinds.add(number)
            first += kind.gpus
        return kinds.pop() if len(kinds) == 1 else len(self.fields.kinds)

    def classes_of_replicas(self, tp: int, pp: int, dp: int) -> list[tuple[int, tuple[int, ...]]]:
        """Returns neighbouring replicas on the same kinds of nodes: how many, and the kind of every stage."""
        each = tp * dp

        def kinds(place: int) -> tuple[int, ...]:
            return tuple(self.kinds_at(i * each + place * tp, i * each + (place + 1) * tp) for i in range(pp))

        return [(len([*replicas]), key) for key, replicas in groupby(range(dp), kinds)]


@dataclass(eq=False)
class StageBlock:
    """Pipelines of runs of stages.

    option, stages: of every run [rows, runs]; all divisions of the layers.
    """

    maker: BlockMaker
    step: StepValues
    options: Sequence[RunOption]
    option: np.ndarray
    stages: np.ndarray
    size: int
    _runs: Runs | None = None

    @property
    def runs(self) -> Runs:
        return divide_layers_of_runs(self.option, self.stages, self.maker.layers)

    def bound(self) -> BlockBounds:
        maker, runs = self.maker, self.runs
        m = maker.total // self.step.micro
        table, schedule = maker.table(self.step.micro, self.options), maker.schedules[self.step.schedule]
        takes, held = schedule.at(m)
        if table.empty:
            nothing = np.zeros(self.size)
            return BlockBounds(nothing, nothing, nothing > 0, nothing > 0)
        valid = table.valid[runs.option].all(axis=1) & takes[runs.stages.sum(axis=1)]
        memory = bound_memory(table, runs, held, self.step.zero)
        seconds = np.full(self.size, np.inf)
        rows = np.flatnonzero(valid & memory.fits)
        if len(rows):
            seconds[rows] = bound_lines(table, runs.take(rows), schedule.schedule).seconds(m)
        return BlockBounds(seconds + maker.fields.loaded.framework.step_overhead_s, memory.nbytes, valid, memory.fits)

    def _list_runs(self, number: int) -> list[tuple[RunOption, int, int]]:
        if self._runs is None:
            self._runs = self.runs
        columns = (column[number].tolist() for column in self._runs)
        return [(self.options[option], stages, layers) for option, stages, layers in zip(*columns, strict=True)]

    def changes(self, number: int) -> Fields:
        """Returns the runs, each as an entry, with the size of a micro-batch and the schedule."""
        return {"plan.stages": [describe_run(*run) for run in self._list_runs(number)], **step_changes(self.step)}

    def job(self, number: int) -> Fields:
        """Returns the job with every stage."""
        return with_plan(self.maker.fields.job, self.step, {"stages": state_stages(self._list_runs(number))})

    def forget(self) -> None:
        """Drops the pipelines, which can be listed again."""
        self._runs = None


@dataclass(eq=False)
class ReplicaBlock(PlanBlock):
    """Replicas, each with its pipeline.

    pipelines: of every replica.
    rates: of the sums of their gradients on the devices of every replica, at least [s/byte].
    ordered: replicas change places freely, and that with more stages or later degrees comes last.
    first: whether plans without pipelines belong to it.
    """

    maker: BlockMaker
    step: StepValues
    options: Sequence[RunOption]
    pipelines: list[Runs]
    rates: tuple[float, ...]
    ordered: bool
    first: bool

    def __post_init__(self) -> None:
        grid = np.meshgrid(*(np.arange(len(runs.option)) for runs in self.pipelines), indexing="ij")
        rows = np.column_stack([numbers.ravel() for numbers in grid])
        alone = np.column_stack([runs.stages[rows[:, i], 0] == 1 for i, runs in enumerate(self.pipelines)]).all(axis=1)
        keep = ~alone | self.first
        if len(self.maker.fields.kinds) == 1:
            option = [runs.option[rows[:, i], 0] for i, runs in enumerate(self.pipelines)]
            stages = [runs.stages[rows[:, i], 0] for i, runs in enumerate(self.pipelines)]
            keep &= (option[0] != option[1]) | (stages[0] != stages[1])
            if self.ordered:
                keep &= rows[:, 0] < rows[:, 1]
        rows = rows[keep]
        count = self.maker.total // self.step.micro
        shares = ["by-speed"] if count >= len(self.pipelines) else []
        shares = ["even", *shares] if shares and count % len(self.pipelines) == 0 else shares
        self.rows = np.tile(rows, (len(shares), 1))
        self.even = np.repeat([share == "even" for share in shares], len(rows)).astype(bool)
        self.count = count

    @property
    def size(self) -> int:
        return len(self.rows)

    def bound(self) -> BlockBounds:
        table, schedule = self.maker.table(self.step.micro, self.options), self.maker.schedules[self.step.schedule]
        if table.empty or not self.size:
            nothing = np.zeros(self.size)
            return BlockBounds(nothing, nothing, nothing > 0, nothing > 0)
        parts = [self._bound_pipeline(number, table, schedule) for number in range(len(self.pipelines))]
        fixed, each, even, nbytes, valid, fits = (np.array(column) for column in zip(*parts, strict=True))
        by_speed = share_bound(fixed, each, np.ones((len(parts), 1)), self.count)
        seconds = np.maximum(np.where(self.even, even.max(axis=0), by_speed), 0.0)
        seconds += self.maker.fields.loaded.framework.step_overhead_s
        valid, fits = (np.all(mask, axis=0, keepdims=True)[0] for mask in (valid, fits))
        return BlockBounds(np.where(valid & fits, seconds, np.inf), nbytes.max(axis=0), valid, fits)

    def _bound_pipeline(self, number: int, table: OptionTable, schedule: ScheduleTable) -> tuple[np.ndarray, ...]:
        """Returns bounds of a replica [plans]: the line of its slowest device, seconds with an even share, memory,
        whether it breaks no rule, and whether it fits."""
        runs, rows, share = self.pipelines[number], self.rows[:, number], self.count // len(self.pipelines)
        takes, held = schedule.at(max(1, share))
        memory, least = (bound_memory(table, runs, flights, self.step.zero) for flights in (held, np.ones_like(held)))
        lines = bound_lines(table, runs, schedule.schedule, self.rates[number])
        nbytes, fits = (np.where(self.even, exact[rows], low[rows]) for exact, low in zip(memory, least, strict=True))
        valid = table.valid[runs.option[rows, 0]] & (takes[runs.stages[rows, 0]] | ~self.even)
        return *(column[rows] for column in (*lines.slowest, lines.seconds(share))), nbytes, valid, fits

    def _list_replicas(self, number: int) -> list[list[tuple[RunOption, int, int]]]:
        replicas = []
        for row, runs in zip(self.rows[number], self.pipelines, strict=True):
            option = self.options[int(runs.option[row, 0])]
            replicas.append([(option, int(runs.stages[row, 0]), int(runs.layers[row, 0]))])
        return replicas

    def changes(self, number: int) -> Fields:
        """Returns the pipeline of every replica as an entry, with the share of the batch."""
        replicas = [describe_run(*run) for (run,) in self._list_replicas(number)]
        share = "even" if self.even[number] else "by-speed"
        return {"plan.replicas": replicas, "plan.share": share, **step_changes(self.step)}

    def job(self, number: int) -> Fields:
        """Returns the job with every stage of every replica."""
        replicas: list[Fields] = [{"stages": state_stages(runs)} for runs in self._list_replicas(number)]
        if self.even[number]:
            replicas = [{"microbatches": self.count // len(replicas), **replica} for replica in replicas]
        share = {} if self.even[number] else {"share": "by-speed"}
        return with_plan(self.maker.fields.job, self.step, {"replicas": replicas, **share})


class EqualDegreesPlan(NamedTuple):
    """Degrees of stages that are alike on several kinds of nodes, and the share of the batch of their replicas."""

    tp: int
    pp: int
    dp: int
    ep: int
    recompute: str
    share: str


@dataclass(eq=False)
class EqualDegreesBlock(PlanBlock):
    """Plans of stages that are alike, on several kinds of nodes."""

    maker: BlockMaker
    step: StepValues
    plans: list[EqualDegreesPlan]

    @property
    def size(self) -> int:
        return len(self.plans)

    def bound(self) -> BlockBounds:
        rows = [self._bound(plan) for plan in self.plans]
        return BlockBounds(*(np.array(column) for column in zip(*rows, strict=True)))

    def _bound(self, plan: EqualDegreesPlan) -> tuple[float, float, bool, bool]:
        maker, even = self.maker, plan.share == "even"
        count = maker.total // self.step.micro
        if even:
            each = plan.tp * plan.dp
            classes = [(plan.dp, tuple(maker.kinds_at(i * each, (i + 1) * each) for i in range(plan.pp)))]
        else:
            classes = maker.classes_of_replicas(plan.tp, plan.pp, plan.dp)
        takes, held = maker.schedules[self.step.schedule].at(count)
        held, possible = (held, takes[plan.pp]) if even else (np.ones_like(held), True)
        replicas = [self._bound_replica(plan, kinds, held) for _, kinds in classes] if possible else [None]
        if None in replicas:
            return np.inf, 0.0, False, False
        memories, lines = zip(*filter(None, replicas), strict=True)
        if even:
            seconds = max(float(line.seconds(count)[0]) for line in lines)
        else:
            fixed, slow = (np.array(column) for column in zip(*(line.slowest for line in lines), strict=True))
            numbers = np.array([[number] for number, _ in classes], float)
            seconds = float(share_bound(fixed, slow, numbers, count * plan.dp)[0])
        nbytes = max(float(memory.nbytes[0]) for memory in memories)
        fits = all(bool(memory.fits[0]) for memory in memories)
        return max(0.0, seconds) + maker.fields.loaded.framework.step_overhead_s, nbytes, True, fits

    def _bound_replica(
        self, plan: EqualDegreesPlan, kinds: tuple[int, ...], held: np.ndarray
    ) -> tuple[PipelineMemory, DeviceLines] | None:
        """Returns the bounds of a replica; None if it breaks a rule. kinds: of the nodes of every stage. held: least
        activations in flight, see `ScheduleTable`."""
        maker, sizes = self.maker, [(kind, len([*stages])) for kind, stages in groupby(kinds)]
        options = [RunOption(kind, plan.tp, plan.dp, plan.ep, plan.recompute) for kind, _ in sizes]
        table = OptionTable(maker.units, options, self.step.micro)
        if not table.valid.all():
            return None
        stages = np.array([[size for _, size in sizes]])
        runs = Runs(np.arange(len(sizes))[None], stages, stages * (maker.layers // plan.pp))
        lines = bound_lines(table, runs, maker.schedules[self.step.schedule].schedule)
        return bound_memory(table, runs, held, self.step.zero), lines

    def changes(self, number: int) -> Fields:
        """Returns the degrees, with the share of the batch."""
        plan = self.plans[number]
        names = ("tp", "pp", *(["ep"] if self.maker.fields.loaded.model.moe else []), "recompute", "share")
        changes = {f"plan.{name}": getattr(plan, name) for name in names}
        return changes | step_changes(self.step._replace(micro=self.step.micro // plan.dp))

    def job(self, number: int) -> Fields:
        """Returns the job in short form."""
        degrees = self.plans[number]
        plan = {name: getattr(degrees, name) for name in ("tp", "pp", "ep", "recompute", "share")}
        return with_plan(self.maker.fields.job, self.step._replace(micro=self.step.micro // degrees.dp), plan)


def share_bound(fixed: np.ndarray, each: np.ndarray, replicas: np.ndarray, count: int) -> np.ndarray:
    """Returns when replicas that share micro-batches in whatever way are done, at the earliest [plans] [s].

    They all end at once at best, with shares that need not be whole numbers: T = fixed + x each, sum of replicas x =
    count. fixed, each: of every kind of replica [kinds, plans] [s]. replicas: of every kind [kinds, 1].
    """
    return np.asarray((count + (replicas * fixed / each).sum(axis=0)) / (replicas / each).sum(axis=0))


def describe_run(option: RunOption, stages: int, layers: int) -> Fields:
    """Returns a run as an entry: the number of stages and of all their layers with their degrees."""
    run: Fields = {"stages": stages, "tp": option.tp, "dp": option.dp, "layers": layers}
    if option.ep > 1:
        run["ep"] = option.ep
    return run if option.recompute == "none" else {**run, "recompute": option.recompute}


def state_stages(runs: Sequence[tuple[RunOption, int, int]]) -> list[Fields]:
    """Returns the stages of a pipeline as a job states them."""
    stated = []
    for number, (option, stages, layers) in enumerate(runs):
        for stage_layers in layers_of_run(stages, layers, number, len(runs)):
            stage: Fields = {"layers": stage_layers, "tp": option.tp, "dp": option.dp}
            stated.append(stage | ({"ep": option.ep} if option.ep > 1 else {}) | {"recompute": option.recompute})
    return stated


def step_changes(step: StepValues) -> Fields:
    """Returns the values that all stages have in common, by field."""
    return {"batch.micro": step.micro, "plan.schedule": step.schedule, "plan.zero": step.zero}


def with_plan(job: Fields, step: StepValues, plan: Fields) -> Fields:
    common = {"schedule": step.schedule, "zero": step.zero}
    return {**job, "batch": {**job["batch"], "micro": step.micro}, "plan": {**job["plan"], **common, **plan}}
