"""A job as a problem: its model, cluster, batch and framework; its plan is what planners choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from numpy.typing import ArrayLike

from meshcast.experiments.planning.clock import check_time, seconds_left
from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import SpaceOptimum
from meshcast.experiments.planning.pricing.operators import STREAM, list_factors
from meshcast.experiments.planning.pricing.stage_layouts import StageOperators
from meshcast.experiments.planning.pricing.stage_prices import UnitCosts, price_stages, unit_costs
from meshcast.experiments.planning.problem import Allowed, Changes, Dims, Problem, allow_all
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.experiments.planning.stages import PlannedStage, StageOption, StageTable
from meshcast.experiments.planning.table import Assignment, FactorTable, PendingTable
from meshcast.hardware.errors import PlanError
from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.report.peak_errors import EVEN, least_room
from meshcast.simulator.report.report import Report

SHARED_AXES = 2
"""Most axes of meshes whose tables are priced whole, for the planners that restrict them."""


class JobProblem:
    """A job without its plan, at the prices of the forecast.

    job: a job, its file or its mapping; of its plan only the number of micro-batches of a step counts, and the degree
        of expert parallelism.
    memory_risk: most probability of lacking memory that a plan may have; least_room: how many times its need by the
        forecast a GPU must therefore have as memory.
    memory: of a GPU that a plan may take by its forecast [bytes].
    samples: sequences of a micro-batch, of all ranks of a stage together.
    microbatches: of a step, in place of those of the plan of the job.
    expert_ranks: of expert parallelism, those of the plan of the job; stages of fewer GPUs have fewer.
    Raises PlanError for a cluster of several kinds of nodes.
    """

    mode = "ours"
    one_kind = True
    """Whether all nodes are equal."""

    def __init__(
        self,
        job: Job | str | Path | Mapping[str, Any],
        shared: SharedWork | None = None,
        microbatches: int = 0,
        memory_risk: float = EVEN,
    ) -> None:
        self.job = job if isinstance(job, Job) else load_job(job)
        self.shared = shared or SharedWork()
        if self.one_kind and len(self.job.cluster.kinds) > 1:
            rule = "planners price GPUs of one kind, and the cluster has several"
            raise PlanError("cluster", rule, "Give a cluster of equal nodes", [*map(str, self.job.cluster.kinds)])
        self.name = str(self.job.id or self.job.model.name)
        self.memory_risk, self.least_room = memory_risk, least_room(self.job.framework, memory_risk)
        self.gpus, self.memory = self.job.cluster.gpus, self.job.cluster.gpu.program_memory / self.least_room
        stated = resolve_plan(self.job, self.shared)
        self.microbatches, self.expert_ranks = microbatches or stated.shape.m, stated.mesh.size("ep")
        self.sequences = int(self.job.to_dict()["batch"]["global"])
        self.samples = self.sequences // self.microbatches

    def with_microbatches(self, count: int) -> Self:
        """Returns the same job in another number of micro-batches."""
        return type(self)(self.job, self.shared, count, self.memory_risk)

    # ----------------------------------------------------------------------------------- jobs of plans

    def job_of(self, changes: Changes) -> dict[str, Any]:
        """Returns the job with the ``plan`` and ``batch`` of a planner, and its ``cluster`` and what it sets of the
        ``framework``, if stated."""
        stated = {key: value for key, value in self.job.to_dict().items() if key not in ("plan", "batch")}
        kernels = {**stated["framework"].get("set", {}), **changes.get("framework", {}).get("set", {})}
        stated["framework"] |= {"rules": self.job.means_program, "recipe": False} | (
            {"set": kernels} if kernels else {}
        )
        stated |= {key: value for key, value in changes.items() if key == "cluster"}
        batch = {key: value for key, value in self.job.to_dict()["batch"].items() if key in ("sequence",)}
        return {**stated, "plan": changes["plan"], "batch": {**batch, **changes["batch"]}}

    @property
    def resizable(self) -> bool:
        """Whether the same nodes may have fewer GPUs: not on several kinds, nor in a cluster of a file."""
        stated = self.job.to_dict()["cluster"]
        return len(self.job.cluster.kinds) <= 1 and not (isinstance(stated, str) and ":" not in stated)

    def resize(self, gpus: int) -> Changes:
        """Returns the change of the job that leaves all but so many GPUs idle; empty for all. Raises PlanError for a
        cluster that is not resizable."""
        return {} if gpus == self.gpus else {"cluster": _resize_cluster(self.job.to_dict()["cluster"], gpus, self.job)}

    def forecast(self, changes: Changes) -> StepAndMemory:
        """Returns the engine's step time and memory of a planner's plan. Raises PlanError for a broken rule."""
        check_time()
        return forecast_step(load_job(self.job_of(changes), base=self.job.folder), self.shared)

    def step_seconds(self, changes: Changes) -> float:
        """Returns the engine's step time of a planner's plan; infinite if it does not fit or breaks a rule [s]."""
        try:
            forecast = self.forecast(changes)
        except PlanError:
            return math.inf
        return forecast.step_time if forecast.room >= self.least_room else math.inf

    def report(self, changes: Changes) -> Report:
        """Returns the whole forecast of a planner's plan. Raises PlanError for a plan that breaks a rule."""
        return simulate(load_job(self.job_of(changes), base=self.job.folder), shared_work=self.shared)

    def resolve(self, changes: Changes) -> Plan:
        """Returns the resolved plan of a planner's plan. Raises PlanError for a broken rule."""
        return resolve_plan(load_job(self.job_of(changes), base=self.job.folder), self.shared)

    # --------------------------------------------------------------------------------------- operators

    @remembered_by(lambda problem, axes, allowed: (tuple(axes.items()), allowed))
    def operators(self, axes: Mapping[str, int], allowed: Allowed = allow_all) -> FactorTable:
        """Returns the table of all operators on a mesh of `axes`, outermost first; see `list_factors`. Raises PlanError
        where the axes have another number of ranks than the cluster has GPUs."""
        if len(axes) <= SHARED_AXES and allowed != allow_all:
            return self._restrict_table(axes, allowed)
        return self.pending_operators(axes, allowed).price_all()

    def pending_operators(self, axes: Mapping[str, int], allowed: Allowed = allow_all) -> PendingTable:
        """Returns the table of all operators on a mesh of `axes`, outermost first, whose tensors are not priced yet.
        Raises PlanError where the axes have another number of ranks than the cluster has GPUs."""
        if math.prod(axes.values()) != self.gpus:
            rule = f"axes of {math.prod(axes.values())} ranks on {self.gpus} GPUs"
            raise PlanError("axes", rule, "Choose sizes whose product is the number of GPUs", dict(axes))
        plan = self._annotate_axes(axes, [{"divide": {"all": None}}], {})
        return list_factors(self.resolve(plan), tuple(axes), self.shared, self.microbatches, allowed)

    def _restrict_table(self, axes: Mapping[str, int], allowed: Allowed) -> FactorTable:
        """Returns a part of the whole table, whose prices planners of several restrictions share."""
        whole = self.operators(axes)

        def keep(name: str, layout: Any) -> bool:
            return not layout or allowed(name, layout)  # experts have a single option

        for name, options in whole.choices.items():
            if not any(keep(name, layout) for layout in options):
                rule = f"a planner's restrictions leave {name} no layout over {dict(axes)}"
                raise PlanError("model", rule, "Choose fewer ranks, or a planner with fewer restrictions", name)
        restricted = whole.restrict(keep)
        return whole if restricted.choices == whole.choices else restricted

    @remembered_by(lambda problem, table: table)
    def bound_layouts(self, table: FactorTable) -> SpaceOptimum:
        """Returns what no layouts of a table that fit into the memory of a GPU are below; infinite if none fit."""
        optimum = eliminate(table)
        if optimum is None or table.cost(optimum.assignment).nbytes <= self.memory:
            return SpaceOptimum(optimum.value if optimum else math.inf, "elimination")
        solved = solve_table(table, self.memory)
        return SpaceOptimum(solved.bound if solved else math.inf, "integer program")

    def _annotate_axes(self, axes: Mapping[str, int], tables: list[dict[str, Any]], stream: Any) -> Changes:
        schemes = [{"use": "tensor/annotated", "over": list(axes), "stream": stream, "tables": tables}]
        batch = {"global": self.sequences, "micro": self.samples}
        plan: dict[str, Any] = {"mesh": dict(axes)}
        if self.expert_ranks > 1:
            plan["views"] = {"experts": {"edp": self.gpus // self.expert_ranks, "ep": self.expert_ranks}}
            schemes = [{"use": "expert/all-to-all", "over": "ep"}, *schemes]
        return {"plan": {**plan, "schemes": schemes}, "batch": batch}

    def annotate(self, table: FactorTable, assignment: Assignment, axes: Mapping[str, int]) -> Changes:
        """Returns the ``plan`` and ``batch`` of a job that executes an assignment of a table of `operators`."""
        return self._annotate_layout(table.options(assignment), axes)  # type: ignore[arg-type]

    def _annotate_layout(self, options: Mapping[str, Dims], axes: Mapping[str, int]) -> Changes:
        layouts: dict[str, dict[str, str | None]] = {
            name: {axis: dim or None for axis, dim in options[name]}
            for name in options
            if options[name]  # experts are sharded by their scheme
        }
        stream = layouts.pop(STREAM)
        return self._annotate_axes(axes, [{"divide": {"all": None, **layouts}}], stream)

    # ------------------------------------------------------------------------------------------ stages

    @remembered
    def stages(self, recompute: bool = True) -> StageTable:
        """Returns the table of stages on powers of two of GPUs in a node, and on whole nodes; see `price_stages`."""
        return price_stages(self._stage_options(recompute), self._resolve_option, self.shared, self.memory)

    @remembered_by(lambda problem, allowed: allowed)
    def layout_stages(self, allowed: Allowed = allow_all) -> StageTable | None:
        """Returns the table of stages whose operators have layouts of their own, by `StageOperators`, on the GPUs of
        `stages` and every logical mesh of them of at most two axes; None where there are none: for models with experts,
        whose scheme shards them, and clusters that are not resizable. Half of the time that is left is theirs."""
        if not self.resizable or self.job.model.moe is not None or self.expert_ranks > 1:
            return None
        options, left = list[StageOption](), seconds_left()
        for gpus in dict.fromkeys(option.gpus for option in self._stage_options(False) if option.gpus > 1):
            for axes in self._logical_meshes(gpus):
                if seconds_left() < left / 2:
                    break
                try:
                    plan = self.resolve(
                        {**self._annotate_axes(axes, [{"divide": {"all": None}}], {}), **self.resize(gpus)}
                    )
                    operators = StageOperators(plan, tuple(axes), self.shared, self.microbatches, allowed)
                except PlanError:  # no layout divides
                    continue
                for layout in operators.layouts(self.memory):
                    if len(axes) > 1 and all(len({dim for _, dim in dims}) == 1 for dims in layout.values()):
                        continue  # a layout of the flat mesh
                    schemes = self._annotate_layout(layout, axes)["plan"]["schemes"]
                    options += [
                        StageOption(gpus, {"mesh": axes, "schemes": [*schemes, *again], "recompute": word})
                        for word, again in (("none", []), ("full", [{"use": "memory/recompute-full"}]))
                    ]
        try:
            return price_stages(options, self._resolve_layout, self.shared, self.memory) if options else None
        except PlanError:
            return None

    def _logical_meshes(self, gpus: int) -> list[dict[str, int]]:
        """Returns the flat mesh, and those of two axes that do not cross borders of nodes within one."""
        inside = min(gpus, self.job.cluster.gpus_per_node)
        inner = [size for size in list_divisors(gpus)[1:-1] if inside % size == 0 or size % inside == 0]
        return [{"x": gpus}, *({"x": gpus // size, "y": size} for size in inner)]

    def _resolve_layout(self, option: StageOption) -> Plan:
        check_time()
        most = self.gpus // option.gpus if self.gpus % option.gpus == 0 else 1
        depth = max(layers for layers in list_divisors(self.job.model.layers) if layers <= most)
        pipeline = [{"use": "pipeline/1f1b", "over": "pp"}] if depth > 1 else []
        mesh = {**({"pp": depth} if depth > 1 else {}), **option.plan["mesh"]}
        plan = {"mesh": mesh, "schemes": [*pipeline, *option.plan["schemes"]]}
        batch = {"global": self.sequences, "micro": self.samples}
        return self.resolve({"plan": plan, "batch": batch, **self.resize(depth * option.gpus)})

    def _write_layouts(self, table: StageTable, stages: Sequence[PlannedStage]) -> Changes:
        """Returns the plan in long form of stages some of which have layouts of their own."""
        entries = []
        for stage in stages:
            option = table.options[stage.option]
            plan: Mapping[str, Any] = option.plan
            if "schemes" not in plan:
                short = self.entries_plan([{**plan, "layers": len(stage.layers)}], self.resize(option.gpus))
                plan = load_job(self.job_of(short), base=self.job.folder).to_dict()["plan"]
            kept = {key: plan[key] for key in ("views",) if plan.get(key)}
            kept["mesh"] = {axis: size for axis, size in plan["mesh"].items() if axis != "pp"}
            kept["schemes"] = [scheme for scheme in plan["schemes"] if scheme.get("over") != "pp"]
            entries.append({"layers": len(stage.layers), **kept})
        if len(entries) == 1:
            whole = {key: value for key, value in entries[0].items() if key != "layers"}
            return {"plan": whole, "batch": {"global": self.sequences, "micro": self.samples}}
        schemes = [{"use": "pipeline/1f1b", "over": "pp"}]
        plan = {"mesh": {"pp": len(entries)}, "schemes": schemes, "stages": entries}
        return {"plan": plan, "batch": {"global": self.sequences, "microbatches": self.microbatches}}

    def _stage_options(self, recompute: bool) -> list[StageOption]:
        per_node = min(self.gpus, self.job.cluster.gpus_per_node)
        powers = [2**power for power in range(per_node.bit_length()) if per_node % 2**power == 0]
        sizes = [*powers, *range(2 * per_node, self.gpus + 1, per_node)]
        options = []
        for size in sizes:
            for tensor in (power for power in powers if size % power == 0 and self.samples % (size // power) == 0):
                for again in ("none", "full") if recompute else ("none",):
                    degrees = {"tp": tensor, "dp": size // tensor, "recompute": again}
                    if self.expert_ranks > 1:
                        degrees["ep"] = math.gcd(self.expert_ranks, size)
                    options.append(StageOption(size, degrees))
        return options

    def _resolve_option(self, option: StageOption) -> Plan:
        check_time()
        # Stages of a part of the nodes do not fill the cluster: those that are priced are the ones that do.
        most = self.gpus // option.gpus if self.gpus % option.gpus == 0 else 1
        depth = max(layers for layers in list_divisors(self.job.model.layers) if layers <= most)
        batch = {"global": self.sequences, "micro": self.samples // int(option.plan["dp"])}
        stated = self.job_of({"plan": {**option.plan, "pp": depth, "partition": "even"}, "batch": batch})
        if depth * option.gpus != self.gpus:
            stated["cluster"] = _resize_cluster(stated["cluster"], depth * option.gpus, self.job)
        return resolve_plan(load_job(stated, base=self.job.folder), self.shared)

    def units_of(self, option: StageOption) -> UnitCosts:
        """Returns the costs of the model's units in stages of an option. Raises PlanError for a broken rule."""
        return unit_costs(self._resolve_option(option), self.shared)

    def units_of_plan(self, changes: Changes) -> UnitCosts:
        """Returns the costs of the model's units in a plan of equal stages. Raises PlanError for a broken rule."""
        return unit_costs(self.resolve(changes), self.shared)

    def stage_plan(self, table: StageTable, stages: tuple[PlannedStage, ...]) -> Changes:
        """Returns the ``plan`` and ``batch`` of a job that executes stages of a table of `stages`."""
        if any("schemes" in table.options[stage.option].plan for stage in stages):
            return self._write_layouts(table, stages)
        entries = [{"layers": len(stage.layers), **table.options[stage.option].plan} for stage in stages]
        return self.entries_plan(entries, {})

    def entries_plan(self, entries: Sequence[Mapping[str, Any]], more: Changes) -> Changes:
        """Returns the ``plan`` and ``batch`` of a job with degrees for each stage.

        entries: of the stages, with their ``layers``. more: other keys of the job, such as its ``cluster``.
        """
        batch = {"global": self.sequences}
        if len(entries) == 1:
            whole = {key: value for key, value in entries[0].items() if key != "layers"}
            return {"plan": whole, "batch": {**batch, "micro": self.samples // int(whole["dp"])}, **more}
        plan = {"schedule": "1f1b", "stages": [dict(entry) for entry in entries]}
        return {"plan": plan, "batch": {**batch, "microbatches": self.microbatches}, **more}

    def add_schemes(self, changes: Changes, schemes: Sequence[Sequence[Mapping[str, object]]]) -> Changes:
        """Returns the changes in long form, with further schemes of every stage. Raises PlanError for a broken rule."""
        plan = load_job(self.job_of(changes), base=self.job.folder).to_dict()["plan"]
        for stage, more in zip(plan.get("stages") or [plan], schemes, strict=True):
            stage["schemes"] = [*stage["schemes"], *map(dict, more)]
        return {**changes, "plan": plan}

    # ------------------------------------------------------------------------------------------- layers

    def graph(self) -> LayerGraph:
        """Returns the chain of embedding, layers and output layer on a GPU, for a micro-batch of all samples."""
        option = StageOption(1, {"tp": 1, "dp": 1, "recompute": "none"})
        plan, units = self._resolve_option(option), self.units_of(option)
        names = ["embedding", *(f"layer {number}" for number in range(len(units.forward) - 2)), "output"]
        width = plan.model_parts.model.stream_width * plan.model_parts.architecture.seq * self.samples * 2.0
        figures: dict[str, ArrayLike] = {
            "forward": units.forward,
            "backward": units.backward,
            "parameters": 2 * units.elements,
            "activations": [*[width] * (len(names) - 1), 0.0],
        }
        return LayerGraph(names, [(i, i + 1) for i in range(len(names) - 1)], figures)

    @property
    def levels(self) -> tuple[NetworkLevel, ...]:
        """The levels of the network: GPUs of a node, and nodes, with the bandwidth of a GPU's links."""
        cluster = self.job.cluster
        inside = min(self.gpus, cluster.gpus_per_node)
        near = cluster.scale_up if cluster.node.scale_up else cluster.host
        levels = [(inside, near), (self.gpus // inside, cluster.scale_out)]
        return tuple(NetworkLevel(width, float(tier.bandwidth)) for width, tier in levels if width > 1)


def require_job(problem: Problem) -> JobProblem:
    """Returns the problem as a job. Raises PlanError for a profile, whose plans are no jobs."""
    if not isinstance(problem, JobProblem):
        raise PlanError(f"problem {problem.name}", "the planner plans jobs", "Give it a job", problem.mode)
    return problem


def _resize_cluster(stated: Any, gpus: int, job: Job) -> Any:
    """Returns a cluster of the same nodes with another number of GPUs. Raises PlanError for the path of a file."""
    nodes = -(-gpus // job.cluster.gpus_per_node)
    if isinstance(stated, str):
        name, colon, _ = stated.partition(":")
        if not colon:
            rule = f"a cluster file has {job.cluster.gpus} GPUs, and a stage is priced on {gpus}"
            raise PlanError("cluster", rule, "Write the cluster into the job", stated)
        return {"node": name, "nodes": nodes, "gpus": gpus}
    return {**stated, "gpus": gpus} | ({"nodes": nodes} if "node" in stated else {})
