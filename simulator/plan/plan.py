"""The plan of a job, resolved: mesh, scheme objects, pipeline shape, layers and sequence slices of every stage.

A plan is made by `simulator.plan.resolve.resolve` and never changed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from meshcast.hardware.cluster import Cluster
from meshcast.simulator.ir.capabilities import (
    AccumulatesByUnit,
    AnnotatesOperators,
    MeetsPeriodically,
    PadsVocabulary,
    VariesSteps,
    schemes_with,
)
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import BatchLossUnit, Stage
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.job import Job
from meshcast.simulator.lowering.scope import Scope
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.scheduling.no_flush import extend_to_steady_state
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule


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
    slice_lengths: tokens of every slice of a sequence; one slice where the schedule does not slice sequences.
    stage_plans: by pipeline device, where stages have degrees of their own, the plan of its ranks: their mesh, schemes
        and share of a micro-batch. `mesh` then has the axis of the pipeline alone, and a micro-batch is of all ranks.
    pipelines: the plans of replicas that run unlike numbers of micro-batches, or have stages of their own.
    positions: of such a plan, where all replicas have the same mesh: the axis of the replicas and its positions.
    vocab_rows: rows of the embedding, where another plan of the same model decides them; otherwise 0.
    architectures: those of earlier plans, by all that they are made of; new ones are added. Equal ones are one object,
        which builds the modules of equal stages once.
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

    # ------------------------------------------------------------------------------------------ schemes

    def family(self, family: str) -> list[Scheme]:
        """The schemes of one family, outermost first."""
        return [scheme for scheme in self.schemes if scheme.family == family]

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline schedule; 1F1B on one device (plain gradient accumulation) where the plan names none."""
        found = [scheme for scheme in self.schemes if isinstance(scheme, Schedule)]
        if found:
            return found[0]
        default = find_scheme("pipeline/1f1b")((), None, self.mesh, self.job.framework)
        assert isinstance(default, Schedule)
        return default

    @property
    def stage_schemes(self) -> list[Scheme]:
        """The schemes that act within a pipeline stage, outermost first."""
        return [scheme for scheme in self.schemes if scheme.family != "pipeline"]

    @cached_property
    def claimed_axes(self) -> set[str]:
        """The axes that belong to a scheme."""
        return {axis for scheme in self.schemes for axis in scheme.axes}

    @property
    def pipeline_axis(self) -> str:
        """The axis of the pipeline; empty, and of size one, where the plan has no pipeline."""
        return self.schedule.axes[0] if self.schedule.axes else ""

    @property
    def replicas(self) -> int:
        """Data-parallel ranks: each trains on samples of its own."""
        return self.mesh.size(axis for scheme in self.family("data") for axis in scheme.over)

    def axis_of(self, part: str, view: str = "") -> str:
        """The axis, as the plan names it, that a part of the mesh belongs to; axes of `view` come first."""
        for wanted in (view, ""):
            for axis in self.mesh.views.get(wanted, {}) if wanted else self.mesh.named_axes:
                if part in self.mesh.parts(axis) and (not wanted or axis in self.claimed_axes):
                    return axis
        return part

    # ------------------------------------------------------------------------------ pipelines and devices

    @property
    def every_pipeline(self) -> tuple[Plan, ...]:
        """The plans of unlike replicas; of equal ones this plan alone."""
        return self.pipelines or (self,)

    @property
    def devices(self) -> int:
        """Number of pipeline devices, of all unlike replicas together."""
        return sum(one.shape.p for one in self.every_pipeline)

    def on(self, device: int) -> Plan:
        """The plan of the ranks of a pipeline device: their mesh, schemes and share of a micro-batch."""
        if self.pipelines:
            pipeline, own = self.pipeline_of(device)
            return self.pipelines[pipeline].on(own)
        return self.stage_plans[device] if self.stage_plans else self

    def pipeline_of(self, device: int) -> tuple[int, int]:
        """The number of the pipeline that has a device, and the number of the device in it."""
        return find_group(device, [one.shape.p for one in self.every_pipeline])

    def pipeline_of_stage(self, stage: int) -> tuple[int, int]:
        """The number of the pipeline that has a virtual stage, and the number of the stage in it."""
        return find_group(stage, [one.shape.stages for one in self.every_pipeline])

    @property
    def every_scheme(self) -> list[Scheme]:
        """The schemes of all stages, equal ones once."""
        if not (self.stage_plans or self.pipelines):
            return list(self.schemes)
        found: dict[Hashable, Scheme] = {}
        for device in range(self.devices):
            for scheme in self.on(device).schemes:
                found.setdefault((scheme.use, scheme.axes, scheme.options), scheme)
        return list(found.values())

    def device_ranks(self, device: int) -> np.ndarray:
        """The global ranks of a pipeline device."""
        return self.rank_grid(device).ranks.ravel()

    def rank_grid(self, device: int) -> RankGrid:
        """The global ranks of a pipeline device along the axes of its mesh."""
        if self.pipelines:
            pipeline, own = self.pipeline_of(device)
            return self.pipelines[pipeline].rank_grid(own)
        mesh = self.on(device).mesh
        axes = tuple(axis for axis in mesh.axes if axis != self.pipeline_axis)
        first = mesh.first
        if self.pipeline_axis in mesh.axes and not mesh.stage:
            first += mesh.offset(self.pipeline_axis, device)
        ranks = np.array(first)
        for axis in axes:
            places = range(mesh.axes[axis])
            if self.positions is not None and axis == self.positions[0]:
                places = self.positions[1]
            ranks = ranks[..., None] + np.array(places) * mesh.stride(axis)
        return RankGrid(axes, ranks)

    @cached_property
    def rank_grids(self) -> list[RankGrid]:
        """The ranks of every pipeline device."""
        return [self.rank_grid(device) for device in range(self.devices)]

    @cached_property
    def device_weights(self) -> np.ndarray:
        """Ranks of every pipeline device over the mean of all devices."""
        if not (self.stage_plans or self.pipelines):
            return np.ones(self.devices)
        counts = np.array([len(self.device_ranks(device)) for device in range(self.devices)])
        return np.asarray(counts / counts.mean())

    # ------------------------------------------------------------------------------------------- stages

    @property
    def parts(self) -> int:
        """Number of parts of the model; bidirectional schedules hold each part on two stages."""
        return self.shape.stages // self.schedule.directions

    def part(self, stage: int) -> int:
        """The part of the model on a virtual stage."""
        return self.schedule.model_part(self.shape, stage)

    def device(self, stage: int) -> int:
        """The pipeline device that holds a virtual stage; both are numbered pipeline by pipeline."""
        if self.pipelines:
            pipeline, own = self.pipeline_of_stage(stage)
            return sum(one.shape.p for one in self.pipelines[:pipeline]) + self.pipelines[pipeline].device(own)
        return self.schedule.device(self.shape, stage)

    @property
    def table_parts(self) -> tuple[int, ...]:
        """Parts of the model that read the table of the embedding, or a copy of it: the last one if the output layer is
        tied, and the one with the input of a decoder behind an encoder."""
        model, last = self.job.model, self.parts - 1
        found = {last} if model.tied or not model.cross_attention else set()
        if model.cross_attention:
            found.add(next(part for part in range(self.parts) if model.encoder_layers in self.layers_of(part)))
        return tuple(sorted(found))

    @property
    def embedding_part(self) -> int:
        """The part of the model that holds the embedding: the first; of a trunk behind branches the first of its own.

        A part without layers, at the end of a pipeline, may have the embedding alone.
        """
        model = self.job.model
        if not model.branches:
            return 0
        first = 0 if model.cross_attention else model.encoder_layers
        return next((part for part in range(self.parts) if first in self.layers_of(part)), 0)

    def holders(self, part: int) -> tuple[int, ...]:
        """The pipeline devices that hold a part of the model."""
        return self._holders[part]

    @cached_property
    def _holders(self) -> list[tuple[int, ...]]:
        """By part of the model, the pipeline devices that hold it."""
        found: list[set[int]] = [set() for _ in range(self.parts)]
        for stage in range(self.shape.stages):
            found[self.part(stage)].add(self.device(stage))
        return [tuple(sorted(devices)) for devices in found]

    def layers_of(self, part: int) -> range:
        """The layers of one part of the model."""
        start = self._starts[part]
        return range(start, start + self.layers[part])

    @cached_property
    def _starts(self) -> list[int]:
        """By part of the model, its first layer."""
        return [0, *accumulate(self.layers)]

    def stage(self, part: int, architecture: Architecture | None = None) -> Stage:
        """The modules of one part of the model. blocks: those of one slice; of whole sequences by default."""
        made = (architecture or self.architecture).stage(self.layers_of(part), part == 0, part == self.parts - 1)
        return replace(made, microbatches=self.microbatches_of_unit) if self.microbatches_of_unit > 1 else made

    @property
    def microbatches_of_unit(self) -> int:
        """Micro-batches that a unit runs before the next one does: all of a step, where a scheme accumulates gradients
        unit by unit; they are then one pass."""
        if not any(scheme.accumulates_by_unit for scheme in schemes_with(self.schemes, AccumulatesByUnit)):
            return 1
        batch = self.job.batch
        assert batch.total is not None
        return batch.total // (batch.micro * self.schedule.microbatches_per_forward * self.replicas)

    def batch_loss(self, part: int) -> BatchLossUnit:
        """The loss over the samples of a batch, on the stage that has one part of the model."""
        return self.architecture.batch_loss(self.layers_of(part), self.shape.m)

    @cached_property
    def model(self) -> Model:
        """The model as it is computed: with dummy heads, where the plan pads heads that the ranks do not divide."""
        if self.stage_plans:
            return self.stage_plans[0].model
        return self.job.model.pad_heads(self.head_ranks) if self.job.plan.pad_heads else self.job.model

    @property
    def head_ranks(self) -> int:
        """Ranks that share the heads of a layer; a multiple of them where operators are sharded in several ways."""
        scope = Scope(self.mesh, self.stage_schemes)
        operators = (operator for unit in self._architecture(self.job.model).units for operator in unit.operators())
        sharded = (one for operator in operators for one in scope.sharded_dims(operator))
        return math.lcm(*(self.mesh.size(sharding) for _, dim, sharding in sharded if dim == "a"))

    @cached_property
    def architecture(self) -> Architecture:
        """Builds the modules of the stages for whole sequences and the samples of a forward pass."""
        return self._architecture(self.model)

    def _architecture(self, model: Model) -> Architecture:
        job, framework = self.job, self.job.framework
        annotated = schemes_with(self.schemes, AnnotatesOperators)
        assert job.batch.sequence is not None
        found = Architecture(
            model,
            job.batch.micro * self.schedule.microbatches_per_forward,
            job.batch.sequence,
            self.vocab,
            self.replicas,
            framework.weights,
            framework.gradients,
            framework.attention,
            (framework.loss.forward, framework.loss.backward),
            framework.loss.kept,
            (framework.loss.peak, framework.loss.sharded_peak or framework.loss.peak),
            framework.quantised,
            adapters=job.adapters,
            document=job.batch.document,
            fp8_activation_inputs=framework.fp8_activation_inputs,
            borders=tuple(sorted({first for scheme in annotated for first in scheme.layer_borders})),
        )
        return self.architectures.setdefault(found, found)

    @cached_property
    def backward_architecture(self) -> Architecture:
        """Builds the modules of the stages for whole sequences and the samples of a backward pass."""
        whole = self.architecture
        return replace(whole, samples=whole.samples // self.schedule.backwards_per_forward)

    @cached_property
    def classes(self) -> tuple[Plan, ...]:
        """The plans of micro-batches of one class alone; of micro-batches that are alike this plan."""
        batch = self.job.batch
        found = [batch.of_class(number, self.replicas) for number in range(len(batch.lengths))]
        return tuple(replace(self, job=self.job.model_copy(update={"batch": one})) for one in found) or (self,)

    @cached_property
    def class_counts(self) -> tuple[int, ...]:
        """Micro-batches of every class in a step, of all replicas."""
        found = [0] * len(self.job.batch.lengths)
        for one in self.every_pipeline:
            replicas = one.replicas
            if one.positions is not None:
                axis, places = one.positions
                replicas = replicas // one.mesh.size(axis) * len(places)
            for number in one.shape.classes:
                found[number] += replicas
        return tuple(found)

    @cached_property
    def slices(self) -> list[Architecture]:
        """Builds the modules of the stages, for each slice of a sequence, or each class of micro-batches; where
        backward passes are of a part of the samples, for a forward and for a backward pass."""
        if self.job.batch.lengths:
            return [one.architecture for one in self.classes]
        if self.schedule.backwards_per_forward > 1:
            return [self.architecture, self.backward_architecture]
        ends = [0, *accumulate(self.slice_lengths)]
        return [self.architecture.slice(begin, end) for begin, end in pairwise(ends)]

    def with_slices(self, lengths: tuple[int, ...]) -> Plan:
        """The plan with sequences in slices of `lengths` tokens."""
        stages = tuple(one.with_slices(lengths) for one in self.stage_plans)
        shape = replace(self.shape, slices=len(lengths))
        return replace(self, shape=shape, slice_lengths=lengths, stage_plans=stages)

    @cached_property
    def slice_granularity(self) -> int:
        """Tokens that the length of every slice must be a multiple of: the product of all axes that shard positions."""
        if self.stage_plans:
            return math.lcm(*(one.slice_granularity for one in self.stage_plans))
        division, found = Scope(self.mesh, self.stage_schemes).division, 1
        for unit in self.architecture.units:
            for operator in unit.operators():
                sharding = [axis for axis, dims in division(operator).items() if "s" in dims.split("|")]
                found = math.lcm(found, self.mesh.size(sharding))
        return found

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding, padded to the framework's multiple where tensor ranks do not divide the vocabulary."""
        if self.vocab_rows:
            return self.vocab_rows
        tensor = self.tensor_ranks
        if self.job.model.vocab % tensor == 0:
            return self.job.model.vocab
        return self.job.model.padded_vocab(self.job.framework.vocab_multiple * tensor)

    @property
    def tensor_ranks(self) -> int:
        """Ranks to which the vocabulary is padded; the least common multiple of those of unlike stages."""
        if self.stage_plans:
            return math.lcm(*(one.tensor_ranks for one in self.stage_plans))
        tensor = self.family("tensor")
        axes = (scheme.vocabulary_axes if isinstance(scheme, PadsVocabulary) else scheme.over for scheme in tensor)
        return self.mesh.size(axis for of_scheme in axes for axis in of_scheme)

    # --------------------------------------------------------------------------------------------- steps

    @cached_property
    def update_interval(self) -> int:
        """Micro-batches between two updates of a schedule without a barrier; 0 with a barrier, or without updates."""
        barrier = self.schedule.barrier or self.job.forward_only
        return 0 if barrier else self.schedule.microbatches_per_update(self.shape)

    @property
    def period(self) -> int:
        """Steps after which the communication of all schemes repeats, see `MeetsPeriodically`."""
        return math.lcm(*(scheme.period for scheme in schemes_with(self.every_scheme, MeetsPeriodically)))

    @property
    def steps(self) -> int:
        """Steps that differ and are forecast one after another, see `VariesSteps`."""
        return max((scheme.steps for scheme in schemes_with(self.every_scheme, VariesSteps)), default=1)

    @property
    def played_shape(self) -> PipelineShape:
        """What the engine plays: one batch; without a barrier as many micro-batches as reach the steady state."""
        return extend_to_steady_state(self.shape, self.update_interval) if self.update_interval else self.shape

    @cached_property
    def clusters(self) -> list[Cluster]:
        """For every pipeline device, the cluster at whose rates it runs.

        Where all ranks of the device are on one kind of node: a cluster of that kind alone. Otherwise the cluster of
        the job, as slow as its slowest kind of node.
        """
        cluster = self.job.cluster
        if not cluster.groups:
            return [cluster] * self.devices
        return [cluster.where(self.device_ranks(device).tolist()) for device in range(self.devices)]


def find_group(number: int, sizes: Sequence[int]) -> tuple[int, int]:
    """The group of consecutive numbers that has `number`, and its place in the group. sizes: of the groups in order."""
    for group, size in enumerate(sizes):
        if number < size:
            return group, number
        number -= size
    raise IndexError(number)


def replace_scheme(plan: Plan, scheme: Scheme, other: Scheme) -> Plan:
    """Returns the plan with another scheme in place of one."""
    return replace(plan, schemes=tuple(other if each is scheme else each for each in plan.schemes))
