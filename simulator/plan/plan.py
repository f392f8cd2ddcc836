"""The plan of a job, resolved: mesh, scheme objects, pipeline shape, layers and sequence slices of every stage.

A plan is made by `simulator.plan.resolve.resolve` and never changed afterwards. What follows from it is grouped by its
subject:

    plan.ranks        which ranks a pipeline device has, along which axes, and on which hardware
    plan.model_parts  which part of the model every stage has, and the modules of it
    plan.passes       which passes a step has, and what each is of: micro-batches, their classes, slices of sequences
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.capabilities import (
    AccumulatesByUnit,
    AnnotatesOperators,
    DividesSequences,
    MeetsPeriodically,
    PadsVocabulary,
    VariesSteps,
    schemes_with,
)
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import BatchLossUnit, Stage
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.framework import Framework, SchemeTraits
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.shorthand import family_degree
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.shapes import Writing
from meshcast.simulator.scheduling.no_flush import extend_to_steady_state
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule
from meshcast.simulator.scheduling.vocabulary import VocabularyShards, find_shards


@dataclass(frozen=True, eq=False)
class RankGrid:
    """The ranks of a pipeline device.

    axes: of its mesh, without that of the pipeline.
    ranks: global ranks [size of each axis].
    """

    axes: tuple[str, ...]
    ranks: np.ndarray


@dataclass(frozen=True, eq=False)
class Plan:
    """A resolved plan.

    job: the job, its model as the schemes run it.
    mesh: axes and views of the ranks.
    schemes: outermost first.
    shape: devices, micro-batches, chunks and slices of the pipeline.
    layers: transformer layers of every part of the model.
    slice_lengths: tokens of every slice of a sequence; a single slice where the schedule does not slice sequences.
    stage_plans: by pipeline device, where stages have unequal degrees, the plan of its ranks: their mesh, schemes
        and share of a micro-batch. `mesh` then has the axis of the pipeline alone, and a micro-batch is of all ranks.
    pipelines: the plans of replicas that run different numbers of micro-batches, or have separate stages.
    positions: of such a plan, where all replicas have the same mesh: the axis of the replicas and its positions.
    vocab_rows: rows of the embedding, where another plan of the same model decides them; otherwise 0.
    architectures: those of earlier plans, by all that they are built from; new ones are added. Equal ones are the same
        object, which builds the modules of equal stages once.
    """

    job: Job
    mesh: Mesh
    schemes: tuple[Scheme, ...]
    shape: PipelineShape
    layers: tuple[int, ...]
    slice_lengths: tuple[int, ...]
    stage_plans: tuple[Plan, ...] = ()
    pipelines: tuple[Plan, ...] = ()
    positions: tuple[str, range] | None = None
    vocab_rows: int = 0
    architectures: dict[Architecture, Architecture] = field(default_factory=dict, repr=False)

    # ---------------------------------------------------------------------------------------- by subject

    @cached_property
    def ranks(self) -> PlanRanks:
        """The ranks of the plan and of its pipeline devices."""
        return PlanRanks(self)

    @cached_property
    def model_parts(self) -> ModelParts:
        """The parts of the model on the stages of the plan."""
        return ModelParts(self)

    @cached_property
    def passes(self) -> PlanPasses:
        """The passes of a step of the plan."""
        return PlanPasses(self)

    # ------------------------------------------------------------------------------------------- schemes

    def family(self, family: str) -> list[Scheme]:
        """Returns the schemes of a family, outermost first."""
        return [scheme for scheme in self.schemes if scheme.family == family]

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule; 1F1B on a single device (plain gradient accumulation) where the plan names none."""
        stated = [scheme for scheme in self.schemes if isinstance(scheme, Schedule)]
        if stated:
            return stated[0]
        default = find_scheme("pipeline/1f1b")((), None, self.mesh, SchemeTraits.of(self.job.framework))
        assert isinstance(default, Schedule)
        return default

    @property
    def stage_schemes(self) -> list[Scheme]:
        """The schemes that act within a pipeline stage, outermost first."""
        return [scheme for scheme in self.schemes if scheme.family != "pipeline"]

    @property
    def every_scheme(self) -> list[Scheme]:
        """The schemes of all stages, equal ones once."""
        if not (self.stage_plans or self.pipelines):
            return list(self.schemes)
        distinct: dict[Hashable, Scheme] = {}
        for device in range(self.ranks.devices):
            for scheme in self.on(device).schemes:
                distinct.setdefault((scheme.use, scheme.axes, scheme.options), scheme)
        return list(distinct.values())

    # -------------------------------------------------------------------------------------- plans inside

    @property
    def every_pipeline(self) -> tuple[Plan, ...]:
        """The plans of heterogeneous replicas; of equal ones this plan alone."""
        return self.pipelines or (self,)

    def on(self, device: int) -> Plan:
        """Returns the plan of the ranks of a pipeline device: their mesh, schemes and share of a micro-batch."""
        if self.pipelines:
            pipeline, place = self.ranks.pipeline_of(device)
            return self.pipelines[pipeline].on(place)
        return self.stage_plans[device] if self.stage_plans else self

    def with_slices(self, lengths: tuple[int, ...]) -> Plan:
        """Returns the plan with sequences in slices of `lengths` tokens."""
        stages = tuple(stage.with_slices(lengths) for stage in self.stage_plans)
        shape = replace(self.shape, slices=len(lengths))
        return replace(self, shape=shape, slice_lengths=lengths, stage_plans=stages)


class PlanRanks:
    """The ranks of a plan: axes, replicas, and pipeline devices with their hardware.

    Devices are numbered pipeline by pipeline where replicas are heterogeneous.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def replicas(self) -> int:
        """Data-parallel ranks: each trains on other samples."""
        return self._plan.mesh.size(axis for scheme in self._plan.family("data") for axis in scheme.over)

    @property
    def tensor_ranks(self) -> int:
        """Ranks to which the vocabulary is padded; the least common multiple of those of heterogeneous stages."""
        if self._plan.stage_plans:
            return math.lcm(*(stage.ranks.tensor_ranks for stage in self._plan.stage_plans))
        tensor = self._plan.family("tensor")
        axes = (scheme.vocabulary_axes if isinstance(scheme, PadsVocabulary) else scheme.over for scheme in tensor)
        return self._plan.mesh.size(axis for of_scheme in axes for axis in of_scheme)

    @property
    def head_ranks(self) -> int:
        """Ranks that share the heads of a layer; a multiple of them where operators are sharded in several ways."""
        plan = self._plan
        scope = Scope(plan.mesh, plan.stage_schemes)
        units = plan.model_parts.architecture_of(plan.job.model).units
        dims = (sharded for unit in units for operator in unit.operators() for sharded in scope.sharded_dims(operator))
        return math.lcm(*(plan.mesh.size(sharding) for _, dim, sharding in dims if dim == "a"))

    # -------------------------------------------------------------------------------------------- axes

    @cached_property
    def claimed_axes(self) -> set[str]:
        """The axes that belong to a scheme."""
        return {axis for scheme in self._plan.schemes for axis in scheme.axes}

    @property
    def pipeline_axis(self) -> str:
        """The axis of the pipeline; empty, and of size 1, where the plan has no pipeline."""
        axes = self._plan.schedule.axes
        return axes[0] if axes else ""

    def axis_of(self, part: str, view: str = "") -> str:
        """Returns the axis, as the plan names it, that a part of the mesh belongs to; axes of `view` come first."""
        mesh = self._plan.mesh
        for wanted in (view, ""):
            for axis in mesh.views.get(wanted, {}) if wanted else mesh.named_axes:
                if part in mesh.parts(axis) and (not wanted or axis in self.claimed_axes):
                    return axis
        return part

    # ----------------------------------------------------------------------------------------- devices

    @property
    def devices(self) -> int:
        """Number of pipeline devices, of all heterogeneous replicas together."""
        return sum(pipeline.shape.p for pipeline in self._plan.every_pipeline)

    def pipeline_of(self, device: int) -> tuple[int, int]:
        """Returns the number of the pipeline that has a device, and the number of the device in it."""
        return find_group(device, [pipeline.shape.p for pipeline in self._plan.every_pipeline])

    def of_device(self, device: int) -> np.ndarray:
        """Returns the global ranks of a pipeline device."""
        return self.grid(device).ranks.ravel()

    def grid(self, device: int) -> RankGrid:
        """Returns the global ranks of a pipeline device along the axes of its mesh."""
        plan = self._plan
        if plan.pipelines:
            pipeline, place = self.pipeline_of(device)
            return plan.pipelines[pipeline].ranks.grid(place)
        mesh, pipeline_axis = plan.on(device).mesh, self.pipeline_axis
        axes = tuple(axis for axis in mesh.axes if axis != pipeline_axis)
        first = mesh.first
        if pipeline_axis in mesh.axes and not mesh.stage:
            first += mesh.offset(pipeline_axis, device)
        ranks = np.array(first)
        for axis in axes:
            places = range(mesh.axes[axis])
            if plan.positions is not None and axis == plan.positions[0]:
                places = plan.positions[1]
            ranks = ranks[..., None] + np.array(places) * mesh.stride(axis)
        return RankGrid(axes, ranks)

    @cached_property
    def grids(self) -> list[RankGrid]:
        """The ranks of every pipeline device."""
        return [self.grid(device) for device in range(self.devices)]

    @cached_property
    def device_weights(self) -> np.ndarray:
        """Ranks of every pipeline device over the mean of all devices."""
        if not (self._plan.stage_plans or self._plan.pipelines):
            return np.ones(self.devices)
        counts = np.array([len(self.of_device(device)) for device in range(self.devices)])
        return np.asarray(counts / counts.mean())

    @cached_property
    def clusters(self) -> list[Cluster]:
        """For every pipeline device, the cluster at whose rates it runs.

        Where all ranks of the device are on nodes of the same kind: a cluster of that kind alone. Otherwise the cluster
        of the job, as slow as its slowest kind of node.
        """
        cluster = self._plan.job.cluster
        if not cluster.groups:
            return [cluster] * self.devices
        return [cluster.where(self.of_device(device).tolist()) for device in range(self.devices)]


class ModelParts:
    """The parts of the model of a plan: where they are, and their modules.

    Bidirectional schedules hold each part on two virtual stages. Stages are numbered pipeline by pipeline where
    replicas are heterogeneous.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def count(self) -> int:
        """Number of parts that have layers, or the embedding or output layer as a whole."""
        if (shards := self.shards) is not None:
            return len(shards.layers)
        return self._plan.shape.stages // self._plan.schedule.directions

    @cached_property
    def shards(self) -> VocabularyShards | None:
        """The stages that hold shards of the vocabulary, as parts behind those with layers; None: there are none."""
        return find_shards(self._plan.schedule, self._plan.shape)

    # ------------------------------------------------------------------------------------------ places

    def of_stage(self, stage: int) -> int:
        """Returns the part on a virtual stage."""
        return self._plan.schedule.model_part(self._plan.shape, stage)

    def pipeline_of(self, stage: int) -> tuple[int, int]:
        """Returns the number of the pipeline that has a virtual stage, and the number of the stage in it."""
        return find_group(stage, [pipeline.shape.stages for pipeline in self._plan.every_pipeline])

    def device(self, stage: int) -> int:
        """Returns the pipeline device that holds a virtual stage."""
        pipelines = self._plan.pipelines
        if pipelines:
            pipeline, place = self.pipeline_of(stage)
            before = sum(other.shape.p for other in pipelines[:pipeline])
            return before + pipelines[pipeline].model_parts.device(place)
        return self._plan.schedule.device(self._plan.shape, stage)

    def holders(self, part: int) -> tuple[int, ...]:
        """Returns the pipeline devices that hold a part."""
        return self._holders[part]

    @cached_property
    def _holders(self) -> list[tuple[int, ...]]:
        """By part, the pipeline devices that hold it."""
        devices: list[set[int]] = [set() for _ in range(self._plan.shape.stages // self._plan.schedule.directions)]
        for stage in range(self._plan.shape.stages):
            devices[self.of_stage(stage)].add(self.device(stage))
        return [tuple(sorted(holders)) for holders in devices]

    def layers_of(self, part: int) -> range:
        """Returns the layers of a part."""
        start = self._starts[part]
        return range(start, start + self._plan.layers[part])

    @cached_property
    def _starts(self) -> list[int]:
        """By part, its first layer."""
        return [0, *accumulate(self._plan.layers)]

    @property
    def with_table(self) -> tuple[int, ...]:
        """Parts that read the table of the embedding, or a copy of it: the last if the output layer is tied, and
        that with the input of a decoder behind an encoder of token ids."""
        model, last = self._plan.job.model, self.count - 1
        parts = {last} if model.tied or not model.cross_attention else set()
        if model.shares_table:
            parts.add(next(part for part in range(self.count) if model.encoder_layers in self.layers_of(part)))
        return tuple(sorted(parts))

    @property
    def with_embedding(self) -> int:
        """The part that holds the embedding: the first; of a trunk or decoder behind branches without it the first of
        these.

        A part without layers, at the end of a pipeline, may have the embedding alone.
        """
        model = self._plan.job.model
        if not model.encoder_layers:
            return 0
        first = 0 if model.shares_table else model.encoder_layers
        return next((part for part in range(self.count) if first in self.layers_of(part)), 0)

    # ----------------------------------------------------------------------------------------- modules

    def stage(self, part: int, architecture: Architecture | None = None) -> Stage:
        """Returns the modules of a part. architecture: of a slice; of whole sequences by default."""
        if (shards := self.shards) is not None:
            return self._between_shards(shards, part, architecture or self.architecture)
        layers, last = self.layers_of(part), part == self.count - 1
        stage = (architecture or self.architecture).stage(layers, part == 0, last)
        repeats = self._plan.passes.microbatches_of_unit
        return replace(stage, microbatches=repeats) if repeats > 1 else stage

    def _between_shards(self, shards: VocabularyShards, part: int, architecture: Architecture) -> Stage:
        """Returns the modules of a part where all devices hold shards of the vocabulary."""
        if part < self.count:
            return architecture.between_shards(self.layers_of(part), part == 0, part == self.count - 1)
        count = len(shards.outputs)
        loss = self._plan.job.framework.loss
        tokens = max(1, architecture.samples * architecture.seq // family_degree(self._plan.job.plan, "sequence"))
        rows = self.vocab // count
        builder = replace(architecture, vocab=rows, loss=loss.shape_of(tokens, rows, self.model.hidden))
        builder = remember(self._plan.architectures, builder, lambda: builder)
        return builder.share_of_vocabulary(shards.role(part), shards.early)

    def batch_loss(self, part: int) -> BatchLossUnit:
        """Returns the loss over the samples of a batch, on the stage that has a part."""
        return self.architecture.batch_loss(self.layers_of(part), self._plan.shape.m)

    @cached_property
    def model(self) -> Model:
        """The model as it is computed: with dummy heads, where the plan pads heads that the ranks do not divide."""
        if self._plan.stage_plans:
            return self._plan.stage_plans[0].model_parts.model
        job = self._plan.job
        return job.model.pad_heads(self._plan.ranks.head_ranks) if job.plan.pad_heads else job.model

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding, padded to the framework's multiple where tensor ranks do not divide the vocabulary."""
        if self._plan.vocab_rows:
            return self._plan.vocab_rows
        model, tensor_ranks = self._plan.job.model, self._plan.ranks.tensor_ranks
        tensor_ranks *= len(self.shards.outputs) if self.shards is not None else 1
        if model.vocab % tensor_ranks == 0:
            return model.vocab
        return model.padded_vocab(self._plan.job.framework.vocab_multiple * tensor_ranks)

    @cached_property
    def architecture(self) -> Architecture:
        """Builder of the modules of the stages for whole sequences and the samples of a forward pass."""
        return self.architecture_of(self.model)

    def architecture_of(self, model: Model) -> Architecture:
        """Returns the same for another variant of the model of the job."""
        plan, job, framework = self._plan, self._plan.job, self._plan.job.framework
        annotated = schemes_with(plan.schemes, AnnotatesOperators)
        assert job.batch.sequence is not None
        samples = job.batch.micro * plan.schedule.microbatches_per_forward
        tokens = max(1, samples * job.batch.sequence // family_degree(job.plan, "sequence"))
        architecture = Architecture(
            model,
            samples,
            job.batch.sequence,
            self.vocab,
            plan.ranks.replicas,
            framework.weights,
            framework.gradients,
            framework.attention,
            framework.loss.shape_of(tokens, self.vocab, model.hidden),
            framework.quantised,
            adapters=job.adapters,
            document=job.batch.document,
            fp8_activation_inputs=framework.fp8_activation_inputs,
            composed=_writing(framework, model),
            borders=tuple(sorted({first for scheme in annotated for first in scheme.layer_borders})),
        )
        return remember(plan.architectures, architecture, lambda: architecture)

    @cached_property
    def backward_architecture(self) -> Architecture:
        """Builder of the modules of the stages for whole sequences and the samples of a backward pass."""
        whole, parts = self.architecture, self._plan.schedule.backwards_per_forward
        return replace(whole, samples=whole.samples // parts) if parts > 1 else whole


def skew_schemes(schemes: Sequence[Scheme], skew: float) -> tuple[Scheme, ...]:
    """Returns schemes for a class of micro-batches whose most loaded rank has so many times the mean of pairs."""
    return tuple(scheme.with_skew(skew) if isinstance(scheme, DividesSequences) else scheme for scheme in schemes)


def _writing(framework: Framework, model: Model) -> tuple[Writing, ...]:
    """Returns how the framework writes the operations of the model.

    A graph of a whole step cannot hold a GEMM for each expert where only the device knows how many tokens it has:
    Megatron-Core then runs the experts in the grouped kernels of cuDNN (`use_transformer_engine_op_fuser` in
    megatron/core/transformer/moe/experts.py @core_v0.18.0), which exist for MXFP8 alone.
    """
    if framework.cuda_graphs is True and framework.quantised == "mxfp8" and model.moe and model.moe.capacity is None:
        return ("grouped-mlp",)
    return () if framework.compile else framework.memory.composed


class PlanPasses:
    """The passes of a step of a plan: what they are of, and after how many of them its updates and steps repeat."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def microbatches_of_unit(self) -> int:
        """Micro-batches that a unit runs before the next does: all of a step, where a scheme accumulates gradients
        unit by unit; they are then a single pass."""
        plan = self._plan
        if not any(scheme.accumulates_by_unit for scheme in schemes_with(plan.schemes, AccumulatesByUnit)):
            return 1
        batch = plan.job.batch
        assert batch.total is not None
        return batch.total // (batch.micro * plan.schedule.microbatches_per_forward * plan.ranks.replicas)

    @cached_property
    def classes(self) -> tuple[Plan, ...]:
        """The plans of micro-batches of a class alone; of micro-batches that are alike this plan."""
        plan, batch = self._plan, self._plan.job.batch
        if batch.rounds:
            return tuple(self._plans_of_degrees())
        batches = [batch.of_class(number, plan.ranks.replicas) for number in range(len(batch.lengths))]
        jobs = [plan.job.model_copy(update={"batch": of}) for of in batches]
        if not batch.is_skewed:
            return tuple(replace(plan, job=job) for job in jobs) or (plan,)
        schemes = [skew_schemes(plan.schemes, kind.skew) for kind in batch.lengths]
        return tuple(replace(plan, job=job, schemes=skewed) for job, skewed in zip(jobs, schemes, strict=True))

    def _plans_of_degrees(self) -> Iterator[Plan]:
        """Yields the plans of micro-batches of every class alone, in groups of its context-parallel degree."""
        from meshcast.simulator.plan.degrees import plan_of_degree, schemes_of_degree

        plan, job, batch = self._plan, self._plan.job, self._plan.job.batch
        usual = family_degree(job.plan, "sequence")
        ranks, plans = family_degree(job.plan, "data") * usual, dict[int, Plan]()
        for number in range(len(batch.lengths)):
            if (degree := batch.degree_of(number, usual)) not in plans:
                long = plan_of_degree(job.plan, plan.mesh, degree)
                schemes = schemes_of_degree(plan.schemes, plan.mesh, degree)
                plans[degree] = replace(plan, schemes=schemes, job=job.model_copy(update={"plan": long}))
            of_class = plans[degree].job.model_copy(update={"batch": batch.of_class(number, ranks // degree)})
            yield replace(plans[degree], job=of_class)

    @cached_property
    def class_counts(self) -> tuple[int, ...]:
        """Micro-batches of every class in a step, of all replicas."""
        counts = [0] * len(self._plan.job.batch.lengths)
        if rounds := self._plan.job.batch.rounds:
            for number in (number for groups in rounds for group in groups for number in group):
                counts[number] += 1
            return tuple(counts)
        for pipeline in self._plan.every_pipeline:
            replicas = pipeline.ranks.replicas
            if pipeline.positions is not None:
                axis, places = pipeline.positions
                replicas = replicas // pipeline.mesh.size(axis) * len(places)
            for number in pipeline.shape.classes:
                counts[number] += replicas
        return tuple(counts)

    @cached_property
    def slices(self) -> list[Architecture]:
        """Builders of the modules of the stages, for each slice of a sequence, or each class of micro-batches; where
        backward passes are of a part of the samples, for a forward and for a backward pass."""
        parts = self._plan.model_parts
        if self._plan.job.batch.lengths:
            return [plan.model_parts.architecture for plan in self.classes]
        if self._plan.schedule.backwards_per_forward > 1:
            return [parts.architecture, parts.backward_architecture]
        ends = [0, *accumulate(self._plan.slice_lengths)]
        return [parts.architecture.slice(begin, end) for begin, end in pairwise(ends)]

    @cached_property
    def slice_plans(self) -> Sequence[Plan]:
        """The plans under whose schemes `slices` are lowered: where groups of ranks have different degrees, or some
        ranks more pairs of tokens, those of the classes."""
        batch = self._plan.job.batch
        return self.classes if batch.rounds or batch.is_skewed else [self._plan] * len(self.slices)

    @cached_property
    def traits_of_classes(self) -> Hashable:
        """What the lowering of classes depends on besides the plan, where they have schemes of their own."""
        job = self._plan.job
        if not (job.batch.rounds or job.batch.is_skewed):
            return ()
        usual = family_degree(job.plan, "sequence")
        return tuple((kind.cp or usual, kind.documents is None, kind.skew) for kind in job.batch.lengths)

    @cached_property
    def slice_granularity(self) -> int:
        """Tokens that the length of every slice must be a multiple of: the product of all axes that shard positions."""
        plan = self._plan
        if plan.stage_plans:
            return math.lcm(*(stage.passes.slice_granularity for stage in plan.stage_plans))
        division, granularity = Scope(plan.mesh, plan.stage_schemes).division, 1
        for unit in plan.model_parts.architecture.units:
            for operator in unit.operators():
                sharding = [axis for axis, dims in division(operator).items() if "s" in dims.split("|")]
                granularity = math.lcm(granularity, plan.mesh.size(sharding))
        return granularity

    @cached_property
    def update_interval(self) -> int:
        """Micro-batches between two updates of a schedule without a barrier; 0 with a barrier, or without updates."""
        schedule = self._plan.schedule
        barrier = schedule.barrier or self._plan.job.forward_only
        return 0 if barrier else schedule.microbatches_per_update(self._plan.shape)

    @property
    def played_shape(self) -> PipelineShape:
        """What the engine plays: a single batch; without a barrier as many micro-batches as reach the steady state."""
        shape, interval = self._plan.shape, self.update_interval
        return extend_to_steady_state(shape, interval) if interval else shape

    @property
    def period(self) -> int:
        """Steps after which the communication of all schemes repeats, see `MeetsPeriodically`."""
        return math.lcm(*(scheme.period for scheme in schemes_with(self._plan.every_scheme, MeetsPeriodically)))

    @property
    def steps(self) -> int:
        """Steps that differ and are forecast in turn, see `VariesSteps`."""
        return max((scheme.steps for scheme in schemes_with(self._plan.every_scheme, VariesSteps)), default=1)


def find_group(number: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Returns the group of consecutive numbers that has `number`, and its place in the group.

    sizes: of the groups in order.
    """
    for group, size in enumerate(sizes):
        if number < size:
            return group, number
        number -= size
    raise IndexError(number)


def replace_scheme(plan: Plan, scheme: Scheme, other: Scheme) -> Plan:
    """Returns the plan with another scheme in place of `scheme`."""
    return replace(plan, schemes=tuple(other if each is scheme else each for each in plan.schemes))
