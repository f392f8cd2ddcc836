"""The steps of resolving a plan: makes scheme objects, checks rules, partitions layers, slices sequences.

The order of the checks decides which of several mistakes is reported: number formats, world size and axes first, then
the checks of each scheme, the number of passes to simulate, the schedule, options that schemes try out, the partition,
divisibility, and the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import validate_data
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import AgingStore, RecentResults, remember
from meshcast.hardware.shared import shared_flat
from meshcast.simulator.ir.capabilities import (
    AdaptsModel,
    AdaptsRecompute,
    ChoosesTensors,
    FitsModels,
    TriesAlternatives,
    VariesSteps,
    schemes_with,
)
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.framework import SchemeTraits
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.shorthand import family_degree
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.plan.checks import (
    ALWAYS,
    check_classes,
    check_contrastive,
    check_decoder,
    check_divisible,
    check_slices,
    check_stated_chunks,
)
from meshcast.simulator.plan.partition import LayerCosts, layers_of_graph
from meshcast.simulator.plan.plan import Plan, replace_scheme
from meshcast.simulator.plan.pricing import JobPricing
from meshcast.simulator.plan.size import check_noisy_steps, check_size
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule

PART_BYTES = 3_000
"""Of a mesh, or of a key that is kept, roughly."""

SCHEME_BYTES = 10_000
"""Of a scheme, roughly."""

ARCHITECTURE_BYTES = 50_000
"""Of an architecture with the modules of its stages, roughly."""

MAX_SLICE_BOUNDARIES = 64
"""Maximum number of positions at which a schedule may slice a sequence."""


@dataclass
class KnownParts:
    """Parts of the plans of earlier jobs; new ones are added. Sharing them changes no plan.

    divisible: keys of plans whose divisibility was checked.
    meshes, schemes, architectures: by all that they are built from. Equal plans have the same objects.
    """

    divisible: RecentResults[Hashable, None] = field(default_factory=partial(RecentResults, lambda _: PART_BYTES))
    meshes: RecentResults[Hashable, Mesh] = field(default_factory=partial(RecentResults, lambda _: PART_BYTES))
    schemes: RecentResults[Hashable, Scheme] = field(default_factory=partial(RecentResults, lambda _: SCHEME_BYTES))
    architectures: RecentResults[Architecture, Architecture] = field(
        default_factory=partial(RecentResults, lambda _: ARCHITECTURE_BYTES)
    )

    def __reduce__(self) -> tuple[type[KnownParts], tuple[()]]:
        return KnownParts, ()  # pickled without what it holds, which is made again

    @property
    def stores(self) -> list[AgingStore]:
        """All stores."""
        return [self.divisible, self.meshes, self.schemes, self.architectures]


@dataclass(frozen=True)
class Resolver:
    """Resolves plans with durations and peaks of memory that are forecast.

    known: parts of the plans of earlier jobs; new ones are added.
    """

    pricing: JobPricing
    known: KnownParts

    def prepare(self, job: Job, checks: Iterable[Callable[[Plan], None]] = ALWAYS) -> Plan:
        """Returns the checked plan of `job` with the shape of its pipeline, without layers and slices."""
        mesh = _mesh(job, self.known)
        schemes = _make_schemes(job, mesh, self.known)
        for adapting in schemes_with(schemes, AdaptsModel):
            job = job.model_copy(update={"model": adapting.adapt_model(job.model)})
        assert job.batch.sequence is not None
        shape, known = PipelineShape(mesh.size(()), 1), self.known.architectures
        plan = Plan(job, mesh, schemes, shape, (), (job.batch.sequence,), architectures=known)
        check_classes(plan)
        for number, class_plan in enumerate(plan.passes.classes):
            with _locate_in_class(plan, number):
                for check in checks:
                    check(class_plan)
                for scheme in schemes:
                    scheme.check_job(class_plan.job)
        plan = replace(plan, shape=_shape(plan))
        check_contrastive(plan)
        check_decoder(plan)
        check_size(plan)
        check_noisy_steps(plan)
        check_stated_chunks(plan)
        plan.schedule.check(plan.shape)
        places = [plan.schedule.place(plan.shape, device) for device in range(plan.shape.p)]
        return (
            plan if places == sorted(places) else replace(plan, mesh=mesh.with_places(plan.ranks.pipeline_axis, places))
        )

    def choose_alternatives(self, plan: Plan) -> Plan:
        """Returns the plan whose schemes have fitted their models to the cluster, and have those of the options that
        they try with the fastest layers, each alone."""

        def seconds(candidate: Plan) -> float:
            return sum(sum(costs.layers) for costs in self.pricing.price_layers(candidate))

        measure = partial(self.pricing.price_work, plan)
        for scheme in schemes_with(plan.schemes, FitsModels):
            plan = replace_scheme(plan, scheme, scheme.fit_models(plan.job, measure))
        for trying in schemes_with(plan.schemes, TriesAlternatives):
            if alternatives := trying.alternatives(plan.job):
                check_divisible(plan, self.known.divisible)
                plan = min((replace_scheme(plan, trying, scheme) for scheme in alternatives), key=seconds)
        return plan

    def layers(self, plan: Plan, partition: str | tuple[int, ...]) -> tuple[int, ...]:
        """Returns the number of layers of every part of the model (`ModelParts`)."""

        def costs() -> Sequence[LayerCosts]:
            self.check_divisible(plan)
            return self.pricing.price_layers(plan)

        if partition == "by-memory":
            from meshcast.simulator.plan.by_memory import partition_by_memory

            self.check_divisible(plan)
            return partition_by_memory(plan, self.sliced_peaks)
        before = [plan.schedule.predecessors(plan.shape, stage) for stage in range(plan.model_parts.count)]
        return tuple(layers_of_graph(partition, plan.job.model, before, plan.schedule.use, costs))

    def sliced_peaks(self, plan: Plan) -> Sequence[float]:
        """Returns peak memory of every device of a plan with layers, its sequences sliced as the schedule states."""
        return self.pricing.measure_peaks(self.slice_sequences(plan))

    def adapt_recompute(self, plan: Plan) -> Plan:
        """Returns the plan with layers and recomputation of every stage chosen for the memory of its device; layers
        that its job states stay."""
        from meshcast.simulator.plan.by_memory import adapt_recompute

        self.check_divisible(plan)
        memory = [cluster.gpu.program_memory for cluster in plan.ranks.clusters]
        partition = plan.job.plan.partition
        stated = None if partition == "even" else self.layers(plan, partition)
        return adapt_recompute(plan, self.sliced_peaks, self.pricing.price_layers, memory, stated)

    def check_divisible(self, plan: Plan) -> None:
        """Checks that every dim of every operator is divisible by the axes that shard it, on all stages."""
        for stage in dict.fromkeys(plan.stage_plans or (plan,)):
            for number, class_plan in enumerate(stage.passes.classes):
                with _locate_in_class(stage, number):
                    check_divisible(class_plan, self.known.divisible)

    def slice_sequences(self, plan: Plan) -> Plan:
        """Slices the sequences of a plan as its schedule states.

        Raises PlanError if the slices are not whole numbers of tokens.
        """
        shares, sequence = plan.schedule.slices, plan.job.batch.sequence
        assert sequence is not None
        if len(shares) == 1:
            return plan
        check_slices(plan)
        if shares:
            return plan.with_slices(tuple(round(share * sequence) for share in shares))
        # Boundaries at multiples of the granularity, few enough for the dynamic program of the schedule.
        granule = plan.passes.slice_granularity
        fits = (n for n in list_divisors(sequence) if n % granule == 0)
        step = next(n for n in fits if sequence // n <= MAX_SLICE_BOUNDARIES)
        proposals = plan.schedule.propose_slices(plan.shape, sequence, step, granule, self.pricing.price_slices(plan))
        plans = [plan.with_slices(tuple(lengths)) for lengths in proposals]
        for sliced in plans:
            check_size(sliced)
            check_noisy_steps(sliced)
        return plans[0] if len(plans) == 1 else min(plans, key=self.pricing.play_step)

    def uniform(self, job: Job) -> Plan:
        """Returns the plan of a job whose stages and replicas are alike."""
        plan = self.choose_alternatives(self.prepare(job))
        if any(scheme.adapts_recompute for scheme in schemes_with(plan.schemes, AdaptsRecompute)):
            return self.slice_sequences(self.adapt_recompute(plan))
        plan = replace(plan, layers=self.layers(plan, job.plan.partition))
        self.check_divisible(plan)
        plan = self.slice_sequences(plan)
        chooses = any(scheme.chooses_tensors for scheme in schemes_with(plan.schemes, ChoosesTensors))
        return self.choose_tensors(plan) if chooses and not plan.shape.classes else plan

    def choose_tensors(self, plan: Plan) -> Plan:
        """Returns the plan with what becomes of the saved tensors of every stage chosen for the memory of its
        device."""
        from meshcast.simulator.plan.by_tensor import choose_tensors

        schemes = schemes_with(plan.schemes, ChoosesTensors)
        stated = [limit for scheme in schemes if (limit := scheme.memory_limit) is not None]
        memory = [min([cluster.gpu.program_memory, *stated]) for cluster in plan.ranks.clusters]
        return choose_tensors(plan, self.pricing, memory)


@contextmanager
def _locate_in_class(plan: Plan, number: int) -> Iterator[None]:
    """Adds the class to errors about the size of micro-batches that are of different lengths."""
    try:
        yield
    except PlanError as error:
        if not plan.job.batch.lengths or "batch." not in f"{error.where} {error.rule}":
            raise
        length = plan.job.batch.lengths[number]
        rule = f"{error.rule} (class {number}: samples {length.samples}, sequence {length.sequence})"
        raise PlanError(error.where, rule, error.remedy, error.value) from None


def _mesh(job: Job, known: KnownParts) -> Mesh:
    """Returns the mesh; a view (of experts) divides the ranks of a pipeline stage along other axes."""
    plan = job.plan
    pipeline = {axis for entry in plan.schemes if entry.use.startswith("pipeline/") for axis in entry.over}
    region = tuple(axis for axis in plan.mesh if axis not in pipeline)
    all_views: dict[str, Mapping[str, int]] = dict(plan.views.items())
    if job.batch.rounds:
        from meshcast.simulator.plan.degrees import degree_views

        usual = family_degree(plan, "sequence")
        degrees = {usual} | {job.batch.degree_of(number, usual) for number in range(len(job.batch.lengths))}
        all_views = {**all_views, **degree_views(plan, sorted(degrees), region)}
    views = tuple((name, *view.items()) for name, view in all_views.items())
    return remember(known.meshes, (tuple(plan.mesh.items()), views, region), lambda: Mesh(plan.mesh, all_views, region))


def _make_schemes(job: Job, mesh: Mesh, known: KnownParts) -> tuple[Scheme, ...]:
    """Makes the scheme objects of a plan, outermost first. Raises PlanError for a scheme that there is not."""
    entries = job.plan.schemes
    kinds = [find_scheme(entry.use, f"plan.schemes[{i}].use") for i, entry in enumerate(entries)]
    sequence_axes = mesh.parts(axis for entry in entries if entry.use.startswith("sequence/") for axis in entry.over)
    pipelines = [(entry, kind) for entry, kind in zip(entries, kinds, strict=True) if issubclass(kind, Schedule)]
    pipelined = any(kind.flush and mesh.size(entry.over) > 1 for entry, kind in pipelines)
    return tuple(
        _make_scheme(job, mesh, i, kind, sequence_axes if kind.family == "data" else (), pipelined, known)
        for i, kind in enumerate(kinds)
    )


def _make_scheme(
    job: Job,
    mesh: Mesh,
    index: int,
    kind: type[Scheme],
    sequence_axes: tuple[str, ...],
    pipelined: bool,
    known: KnownParts,
) -> Scheme:
    """Makes the scheme object of an entry of the plan.

    Raises PlanError for axes that the scheme or the mesh does not have, and for unknown options.
    """
    entry = job.plan.schemes[index]
    where = f"plan.schemes[{index}]"
    stated = entry.model_extra or {}
    axes = kind.all_axes(entry.over, stated)
    _check_axes(entry.over, axes, kind, stated, mesh, where)
    keys = ["use", "over", *kind.Options.model_fields]
    for key in stated:
        if key not in keys:
            raise PlanError(f"{where}.{key}", f"no such key of {entry.use}", nearest(key, keys))
    options = shared_flat(kind.Options, stated, lambda: validate_data(kind.Options, stated, where, PlanError))
    made_of = axes, options, mesh, SchemeTraits.of(job.framework), sequence_axes, pipelined

    def make() -> Scheme:
        scheme = kind(*made_of)
        return scheme.at_step(job.step) if isinstance(scheme, VariesSteps) else scheme

    made_from = kind, made_of, job.step
    try:
        return remember(known.schemes, made_from, make)
    except TypeError:  # options that are tables have no hash
        return make()


def _check_axes(
    over: Sequence[str], axes: Sequence[str], kind: type[Scheme], stated: dict[str, Any], mesh: Mesh, where: str
) -> None:
    """Raises PlanError for a wrong number of axes, or for an axis that the mesh or the view of experts does not
    have."""
    use = f"{kind.family}/{kind.name}"
    if kind.most_axes is not None and len(axes) > kind.most_axes:
        most = {0: "no axis", 1: "one axis"}.get(kind.most_axes, f"at most {kind.most_axes} axes")
        raise PlanError(f"{where}.over", f"{use} takes {most}", "Leave the others out", list(axes))
    if len(axes) < kind.least_axes:
        rule = f"{use} divides ranks along {kind.least_axes} axes"
        raise PlanError(f"{where}.over", rule, f"Name {kind.least_axes} axes of plan.mesh", list(axes))
    view = EXPERTS if kind.family == "expert" else ""
    existing = mesh.views.get(view, {}) if view else mesh.named_axes
    for axis in axes:
        if axis not in existing:
            key = next((key for key in kind.names_axes if stated.get(key) == axis and axis not in over), "over")
            place = f"plan.views.{view}" if view else "plan.mesh"
            if not existing:
                remedy = f"Say how experts are spread: plan.views: {{experts: {{edp: ..., {axis}: ...}}}}"
                raise PlanError(f"{where}.{key}", f"there is no {place}", remedy, axis)
            raise PlanError(f"{where}.{key}", f"no such axis in {place}", nearest(axis, existing), axis)


def _shape(plan: Plan) -> PipelineShape:
    batch, p = plan.job.batch, plan.mesh.size(plan.ranks.pipeline_axis)
    assert batch.total is not None
    microbatches = batch.total // (batch.micro * plan.schedule.microbatches_per_forward * plan.ranks.replicas)
    microbatches //= plan.passes.microbatches_of_unit
    if batch.lengths:
        microbatches = len(batch.order)
    slices = max(1, len(plan.schedule.slices))
    chunks = plan.schedule.chunks_per_device()
    contrastive = plan.job.model.contrastive is not None
    return PipelineShape(p, microbatches, chunks, slices, plan.job.forward_only, batch.order, contrastive)
