"""A plan made ready: mesh, scheme objects, stages. The rules that it must obey are those of ``simulator.plan.checks``."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise

from hardware.cluster import Cluster
from hardware.errors import PlanError, nearest
from hardware.load import validated
from simulator.engine.steady_state import long_enough
from simulator.ir.mesh import Mesh
from simulator.ir.modules import Stage
from simulator.ir.moe_operators import EXPERTS
from simulator.ir.scheme import Scheme, find_scheme
from simulator.job.job import Job, located
from simulator.lowering.lower import Lowering
from simulator.models.blocks import Blocks
from simulator.plan.checks import ALWAYS, check_divisible, check_size, check_slices
from simulator.plan.partition import Weights, layers_of_graph
from simulator.scheduling.schedule import Lasts, PipelineShape, Schedule

MAX_CUTS = 64
"""Most places at which a policy may cut a sequence."""


class Plan:
    """The plan of a job, checked.

    divisible: what was found to divide for other plans; new findings are added.
    Raises PlanError for the first rule that it breaks.
    """

    def __init__(self, job: Job, divisible: set[Hashable] | None = None) -> None:
        self.job = job
        self.divisible = divisible if divisible is not None else set()
        with located(*job.origin):
            self._check(job)

    def _check(self, job: Job) -> None:
        self.mesh = self._mesh()
        self.schemes = [self._scheme(i) for i in range(len(job.plan.schemes))]
        for scheme in self.schemes:
            job = job.model_copy(update={"model": scheme.adapt(job.model)})
        self.job = job
        for check in ALWAYS:
            check(self)
        for scheme in self.schemes:
            scheme.accept(job)
        self.shape = self._shape()
        check_size(self)
        self.schedule.check(self.shape)
        self.parts = self.shape.stages // self.schedule.directions
        before = [self.schedule.before(self.shape, stage) for stage in range(self.parts)]
        self.layers = layers_of_graph(job.plan.partition, job.model, before, self.schedule.use, self._weights)
        check_divisible(self)
        self.lengths = self._lengths()

    def _weights(self) -> list[Weights]:
        """What the parts of the model cost on every stage, where the plan divides them by that."""
        from simulator.forecast.layer_costs import weights_of

        check_divisible(self)
        return weights_of(self)

    # -------------------------------------------------------------------------------------- parts

    def _mesh(self) -> Mesh:
        """Views read the ranks of one pipeline stage again."""
        plan = self.job.plan
        pipeline = {axis for entry in plan.schemes if entry.use.startswith("pipeline/") for axis in entry.over}
        return Mesh(plan.mesh, plan.views, [axis for axis in plan.mesh if axis not in pipeline])

    def _scheme(self, i: int) -> Scheme:
        entry = self.job.plan.schemes[i]
        where = f"plan.schemes[{i}]"
        kind = find_scheme(entry.use, f"{where}.use")
        told = entry.model_extra or {}
        over = kind.all_axes(entry.over, told)
        if kind.most_axes is not None and len(over) > kind.most_axes:
            most = {0: "no axis", 1: "one axis"}.get(kind.most_axes, f"at most {kind.most_axes} axes")
            rule = f"{entry.use} takes {most}"
            raise PlanError(f"{where}.over", rule, "Leave the others out", list(over))
        if len(over) < kind.least_axes:
            rule = f"{entry.use} divides ranks along {kind.least_axes} axes"
            raise PlanError(f"{where}.over", rule, f"Name {kind.least_axes} axes of plan.mesh", list(over))
        view = EXPERTS if kind.family == "expert" else ""
        axes = self.mesh.views.get(view, {}) if view else self.mesh.named
        for axis in over:
            if axis not in axes:
                key = next((key for key in kind.names_axes if told.get(key) == axis and axis not in entry.over), "over")
                place = f"plan.views.{view}" if view else "plan.mesh"
                if not axes:
                    remedy = f"Say how experts are spread: plan.views: {{experts: {{edp: ..., {axis}: ...}}}}"
                    raise PlanError(f"{where}.{key}", f"there is no {place}", remedy, axis)
                raise PlanError(f"{where}.{key}", f"no such axis in {place}", nearest(axis, axes), axis)
        known = ["use", "over", *kind.Options.model_fields]
        for key in told:
            if key not in known:
                raise PlanError(f"{where}.{key}", f"no such key of {entry.use}", nearest(key, known))
        options = validated(kind.Options, told, where, PlanError)
        sequence = (e.over for e in self.job.plan.schemes if e.use.startswith("sequence/"))
        beside = self.mesh.parts(axis for axes in sequence for axis in axes) if kind.family == "data" else ()
        return kind(over, options, self.mesh, self.job.framework, beside)

    def family(self, family: str) -> list[Scheme]:
        return [scheme for scheme in self.schemes if scheme.family == family]

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline; without one, plain accumulation of micro-batches."""
        found = [scheme for scheme in self.schemes if isinstance(scheme, Schedule)]
        if found:
            return found[0]
        default = find_scheme("pipeline/1f1b")((), None, self.mesh, self.job.framework)
        assert isinstance(default, Schedule)
        return default

    @property
    def inside(self) -> list[Scheme]:
        """The schemes that act within a stage, outermost first."""
        return [scheme for scheme in self.schemes if scheme.family != "pipeline"]

    @property
    def pipeline_axis(self) -> str:
        """The axis of the pipeline; empty, and of size one, where no scheme makes a pipeline."""
        return self.schedule.axes[0] if self.schedule.axes else ""

    @property
    def replicas(self) -> int:
        """Data-parallel copies: each takes its own samples."""
        return self.mesh.size(axis for scheme in self.family("data") for axis in scheme.over)

    def _shape(self) -> PipelineShape:
        batch = self.job.batch
        assert batch.total is not None
        m = batch.total // (batch.micro * self.replicas)
        slices = max(1, len(self.schedule.slices))
        return PipelineShape(self.mesh.size(self.pipeline_axis), m, self.schedule.chunks(), slices)

    def _lengths(self) -> tuple[int, ...]:
        """Tokens of the slices of a sequence; all, as long as the schedule waits for `settle`.

        Raises PlanError where the schedule's shares are no slices of this sequence.
        """
        shares, sequence = self.schedule.slices, self.job.batch.sequence
        assert sequence is not None
        if len(shares) != 1:
            check_slices(self)
        return tuple(round(share * sequence) for share in shares) or (sequence,)

    def settle(self, lasts: Lasts) -> None:
        """Cuts sequences where the schedule leaves that to how long slices take."""
        sequence = self.job.batch.sequence
        assert sequence is not None
        if not self.schedule.slices:
            # Multiples of what divides, no more of them than a policy can look through.
            fits = (n for n in range(self.grain, sequence + 1, self.grain) if sequence % n == 0)
            step = next(n for n in fits if sequence // n <= MAX_CUTS)
            self.lengths = self.schedule.cut(self.shape, sequence, step, lasts)
            self.shape = replace(self.shape, slices=len(self.lengths))
            self.__dict__.pop("slices", None)
            check_size(self)

    @cached_property
    def grain(self) -> int:
        """Of how many tokens every slice must be a multiple: all the ways in which ranks divide positions."""
        division, found = Lowering(self.mesh, self.inside).division, 1
        for unit in self.blocks.units:
            for operator in unit.operators():
                cutting = [part for part, dims in division(operator).items() if "s" in dims.split("|")]
                found = math.lcm(found, self.mesh.size(cutting))
        return found

    @cached_property
    def slices(self) -> list[Blocks]:
        """Builds the stages' sites for each slice."""
        ends = [0, *accumulate(self.lengths)]
        return [self.blocks.cut(begin, end) for begin, end in pairwise(ends)]

    @cached_property
    def every(self) -> int:
        """Of a schedule without a flush, micro-batches between two updates; else 0."""
        return 0 if self.schedule.flush else self.schedule.update_every(self.shape)

    @property
    def period(self) -> int:
        """Steps that come round together: see `Scheme.period`."""
        return math.lcm(*(scheme.period for scheme in self.schemes))

    @property
    def run(self) -> PipelineShape:
        """What is played: one batch; without a flush as many micro-batches as show how batches follow each other."""
        return long_enough(self.shape, self.every) if self.every else self.shape

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding, padded where the framework's multiple asks for it and tp does not divide it."""
        tensor = self.mesh.size(axis for scheme in self.family("tensor") for axis in scheme.over)
        if self.job.model.vocab % tensor == 0:
            return self.job.model.vocab
        return self.job.model.padded_vocab(self.job.framework.vocab_multiple * tensor)

    @cached_property
    def blocks(self) -> Blocks:
        """Builds the stages' sites."""
        job, framework = self.job, self.job.framework
        assert job.batch.sequence is not None
        return Blocks(
            job.model,
            job.batch.micro,
            job.batch.sequence,
            self.vocab,
            self.replicas,
            framework.weights,
            framework.gradients,
            framework.attention,
            (framework.loss.forward, framework.loss.backward),
            framework.loss.kept,
            framework.quantised,
            adapters=job.adapters,
        )

    @cached_property
    def clusters(self) -> list[Cluster]:
        """For every device of the pipeline the cluster whose figures its stages run at: where its ranks all lie on one
        kind of node, as if all nodes were of that kind, else the job's, as slow as its slowest kind."""
        cluster, mesh = self.job.cluster, self.mesh
        if not cluster.groups:
            return [cluster] * self.shape.p
        strides = [(mesh.axes[axis], mesh.stride(axis)) for axis in mesh.axes if axis != self.pipeline_axis]
        within = [0]
        for size, stride in strides:
            within = [rank + i * stride for rank in within for i in range(size)]
        step = mesh.stride(self.pipeline_axis) if self.pipeline_axis else 0
        return [cluster.where([device * step + rank for rank in within]) for device in range(self.shape.p)]

    def axis_of(self, part: str, view: str = "") -> str:
        """The axis, as the plan names it, that a part of the mesh belongs to; in a view its own ones come first."""
        for wanted in (view, ""):
            for axis in self.mesh.views.get(wanted, {}) if wanted else self.mesh.named:
                if part in self.mesh.parts(axis) and (not wanted or axis in self.claimed_axes):
                    return axis
        return part

    @cached_property
    def claimed_axes(self) -> set[str]:
        """The axes that a scheme says something about."""
        return {axis for scheme in self.schemes for axis in scheme.axes}

    def layers_of(self, index: int) -> range:
        """The layers of one part of the model: of a virtual stage."""
        start = sum(self.layers[:index])
        return range(start, start + self.layers[index])

    def stage(self, index: int, blocks: Blocks | None = None) -> Stage:
        """The sites of one part of the model. blocks: of a slice; of whole sequences where none is given."""
        return (blocks or self.blocks).stage(self.layers_of(index), index == 0, index == self.parts - 1)

    def part(self, stage: int) -> int:
        """The part of the model that a virtual stage holds."""
        return self.schedule.part(self.shape, stage)

    def device(self, stage: int) -> int:
        """The device of the pipeline that holds a virtual stage."""
        return self.schedule.device(self.shape, stage)

    def holders(self, part: int) -> tuple[int, ...]:
        """The devices that hold a part of the model."""
        return tuple(sorted({self.device(s) for s in range(self.shape.stages) if self.part(s) == part}))
