"""The base class of all parallelism schemes, and the types of its hooks.

A scheme is one published idea in one file, ``simulator/schemes/<family>/<name>.py`` (``-`` in the plan is ``_`` in the
file). It states which dim its axes shard at an operator (`layouts`), or changes how a module (`lower`) or a stage
(`lower_stage`) is lowered, or, for a pipeline, orders the actions of the devices (``simulator.scheduling.schedule``).
It also states the closed forms of its paper that must hold under ideal costs (`closed_forms`). A scheme knows shapes,
bytes, groups and order, and no seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Module, Operator, Stage
from meshcast.simulator.ir.ops import Fragment, Param, StageOps, Work

FAMILIES = ("pipeline", "tensor", "sequence", "expert", "data", "memory")
SHORT = {"pipeline": "pp", "tensor": "tp", "sequence": "cp", "expert": "ep", "data": "dp", "memory": "copy"}
"""The word for the communication of each family in reports."""


@dataclass(frozen=True)
class Paper:
    """The publication of an idea.

    ref: arXiv number or DOI.
    title: title.
    year: year of publication.
    """

    ref: str
    title: str
    year: int


@dataclass(frozen=True)
class ClosedForm:
    """A formula of the paper: a measured quantity that must equal a value.

    quantity: name of a quantity that the contract suite measures (tests/contract).
    value: its value.
    where: section or equation of the paper, and what it says.
    """

    quantity: str
    value: Any
    where: str


@dataclass(frozen=True)
class Rule:
    """How a scheme shards an operator. A plain dim name is short for a rule that shards this dim over all its axes.

    divide: from axis to the dim that it shards; ``b|h``: samples, and `h` of the tensors without samples (see
        `simulator.ir.layout`); empty: none, also where a scheme further out shards one.
    at_rest: from axis to the dim of the weights that it shards while no pass uses them: weights are all-gathered before
        each pass, and their gradients reduce-scattered after it.
    """

    divide: Mapping[str, str] = field(default_factory=dict)
    at_rest: Mapping[str, str] = field(default_factory=dict)


LowerModule = Callable[[Module], Fragment]
"""Lowers a module under the schemes further in."""

LowerStage = Callable[[Stage], StageOps]
"""Lowers a stage under the schemes further in."""


class SchemeOptions(BaseModel):
    """Options of a scheme without options; schemes with options derive from this."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Scheme:
    """Base class of all schemes.

    Customise by: `layouts` (sharding of activations and weights), `lower` and `lower_stage` (ops added to or changed in
    a module or a stage), `shards_at_rest` and `reduces` (data parallelism), `closed_forms`. Seldom: `check_job`,
    `check_operators`, `alternatives`, `fit_models`, `adapt_model`, `assumptions`, `layer_borders`, `vocabulary_axes`,
    `gathered_axes`, `secondary_shards`, `accumulation_shards`, `update_shards`, `offloaded_to`, `own_states`,
    `buffer_bytes`, `unsynchronised_axes`, `period`, `steps`, `at_step`, `accumulates_by_unit`, `shard_sizes`,
    `offloaded_share`, `measures_memory`, `adapts_recompute`, `chooses_tensors`.

    Attributes:
        name: name of the scheme in a plan, from the name of its file.
        axes: its axes, in the order of its paper.
        over: the parts of its axes (see `Mesh`).
        options: its options.
        mesh: the device mesh.
        framework: the traits of the framework that it runs in.
        sequence_axes: parts of the axes of sequence parallelism, along which ranks hold the same weights and other
            tokens.
        pipelined: whether the plan divides the model among the stages of a pipeline that flushes after each step.
    """

    family: ClassVar[str]
    role: ClassVar[str] = ""
    """A role that only one scheme of a plan can have, in words for users (``pipeline schedule``); empty: none."""
    required_roles: ClassVar[tuple[str, ...]] = ()
    """Roles that other schemes of the plan must have."""
    least_axes: ClassVar[int] = 0
    most_axes: ClassVar[int | None] = None
    """Least and largest number of its axes; None: any number."""
    names_axes: ClassVar[tuple[str, ...]] = ()
    """Options that name further axes of its own, after those of `over`."""
    shares_axes: ClassVar[bool] = False
    """Whether a data scheme further out may have its axes, too: that one says where states rest, this one what ranks
    compute."""
    joins_axes: ClassVar[bool] = False
    """Whether equal collectives over several of its axes are one collective."""
    changes_kernels: ClassVar[bool] = False
    """Whether it has kernels of its own, which also a single rank runs."""
    updates_weights: ClassVar[bool] = True
    """Whether sharded weights are the main weights of the optimizer; otherwise it holds a copy of its own."""
    takes_projected_keys: ClassVar[bool] = True
    """Whether models may project keys and values along the sequence, which all ranks then have whole."""
    needs_package: ClassVar[str] = ""
    """A Python package that only an extra installs; empty: none."""
    name: ClassVar[str]
    paper: ClassVar[Paper]
    Options: ClassVar[type[SchemeOptions]] = SchemeOptions

    def __init__(
        self,
        over: Sequence[str] = (),
        options: SchemeOptions | None = None,
        mesh: Mesh | None = None,
        framework: Any = None,
        sequence_axes: Sequence[str] = (),
        pipelined: bool = False,
    ) -> None:
        self.axes = tuple(over)
        self.options: Any = options if options is not None else self.Options()
        self.mesh = mesh if mesh is not None else Mesh({})
        self.over = self.mesh.parts(self.axes)
        self.framework = framework
        self.sequence_axes = tuple(sequence_axes)
        self.pipelined = pipelined

    @classmethod
    def all_axes(cls, over: Sequence[str], given: Mapping[str, Any]) -> tuple[str, ...]:
        """All axes of a scheme: those of `over`, and those that its options name.

        given: the options as the plan gives them.
        """
        named = (given.get(option) for option in cls.names_axes)
        return (*over, *(axis for axis in named if axis))

    @classmethod
    def axis_sizes(cls, ranks: int, near: int) -> list[tuple[int, ...]]:
        """Sizes of its axes over so many ranks, as far as they follow from this number: one that is meant, several
        among which a plan has to choose, or none.

        near: how many neighbours of these ranks share a node.
        """
        return [(ranks,)] if cls.least_axes < 2 else []

    @property
    def view(self) -> str:
        """The view of the mesh that has its axes; empty for the mesh itself."""
        return self.mesh.view_of(self.axes[0]) if self.axes else ""

    def adapt_model(self, model: Any) -> Any:
        """The model as the plan runs it, for example with another capacity factor."""
        return model

    def assumptions(self, model: Any) -> Iterable[str]:
        """Assumptions about the run that reports list, in words for users."""
        return ()

    def check_job(self, job: Any) -> None:
        """Raises PlanError if the job has something that the scheme does not support."""

    def check_operators(self, operators: Sequence[Operator], layers: int, where: str) -> None:
        """Raises PlanError if its options do not fit the operators of the model.

        layers: of the model.
        where: place of the scheme in the job.
        """

    def alternatives(self) -> Sequence[Scheme]:
        """The scheme with each of the options that its system tries at run time, to keep those of the fastest layer;
        empty if its options say everything."""
        return ()

    def fit_models(self, job: Any, measure: Callable[[Work], float]) -> Scheme:
        """The scheme after its system has measured work on the cluster, before training; by default as it is.

        measure: seconds of some work, alone on its rank.
        """
        return self

    def with_options(self, **options: Any) -> Scheme:
        """The scheme with some other options."""
        changed = self.options.model_copy(update=options)
        return type(self)(self.axes, changed, self.mesh, self.framework, self.sequence_axes, self.pipelined)

    def layouts(self, operator: Operator) -> str | Rule | None:
        """The dim that its axes shard at this operator; None: none."""
        return None

    @property
    def layer_borders(self) -> tuple[int, ...]:
        """Numbers of the layers from which on it shards other dims than in the layers before; none: it shards the same
        in all layers."""
        return ()

    @property
    def vocabulary_axes(self) -> tuple[str, ...]:
        """Axes of a tensor scheme to whose ranks the vocabulary is padded."""
        return self.over

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """Axes over which it shards all weights between their passes, and gathers them as it says itself."""
        return ()

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        """The ops of a module; ``inner(module)`` lowers it under the schemes further in."""
        return inner(module)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        """The ops of a stage; ``inner(stage)`` lowers it under the schemes further in."""
        return inner(stage)

    @property
    def lowering_key(self) -> Hashable:
        """Equal for schemes under which every unit lowers to the same ops."""
        parts = tuple(self.mesh.parts(axis) for axis in self.axes)
        return self.use, parts, tuple(self.mesh.size(axis) for axis in self.over), self.options

    @property
    def unit_key(self) -> Hashable:
        """Equal for schemes under which every unit lowers to the same ops before a whole stage is lowered."""
        return self.lowering_key

    def reduces(self, param: Param) -> tuple[str, ...]:
        """Axes over which it reduces the gradient of `param`; over other axes the update reduces it."""
        return ()

    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        """Axes over which `state` (parameters, gradients, optimizer) of `param` is sharded in memory."""
        return ()

    def accumulation_shards(self, param: Param) -> tuple[str, ...]:
        """Axes over which the gradient of `param` is sharded while micro-batches add to it."""
        return self.shards_at_rest("gradients", param)

    def offloaded_to(self, state: str) -> str:
        """Where `state` is offloaded to: ``cpu`` for the memory of the host, ``nvme`` for its disks; empty: nowhere."""
        return ""

    def own_states(self, param: Param) -> Mapping[str, float]:
        """Bytes of the states of `param` that one rank keeps for the scheme itself, by place (gpu, cpu, nvme): neither
        weights, gradients nor moments, but for example the error of a compressed reduction.
        """
        return {}

    def offloaded_share(self, state: str) -> float:
        """Share of `state` that is offloaded; the rest stays on the GPU."""
        return 1.0 if self.offloaded_to(state) else 0.0

    @property
    def measures_memory(self) -> bool:
        """Whether a warm-up step decides where states lie, see `place_states`."""
        return False

    def place_states(self, memory: float, used: float, states: Mapping[str, float]) -> Scheme:
        """The scheme with states where a warm-up step finds room for them.

        memory: of a GPU [bytes].
        used: peak of what is not states in the warm-up step [bytes].
        states: bytes of parameters, gradients and optimizer state of a rank, wherever they lie.
        """
        return self

    @property
    def adapts_recompute(self) -> bool:
        """Whether layers and how many of them are recomputed are chosen for every stage, see `recompute_layers`."""
        return False

    def recompute_layers(self, count: int) -> Scheme:
        """The scheme that recomputes so many layers of a stage, of those that `adapts_recompute`."""
        raise NotImplementedError(self.use)

    @property
    def chooses_tensors(self) -> bool:
        """Whether it is chosen for every stage which saved tensors leave it, and where to, see `with_tensors`."""
        return False

    @property
    def tensor_choices(self) -> Sequence[Any]:
        """What is stated to become of the saved tensors of every stage; empty: to be chosen."""
        return ()

    def with_tensors(self, choices: Sequence[Any], stage: int) -> Scheme:
        """The scheme on a stage, of those that `chooses_tensors`. choices: a `TensorChoice` for every stage."""
        raise NotImplementedError(self.use)

    @property
    def memory_limit(self) -> float | None:
        """Memory of a device that its choices keep to [bytes]; None: that of the GPU."""
        return None

    def secondary_shards(self, param: Param) -> tuple[str, ...] | None:
        """Axes over which a secondary copy of sharded weights, in the compute format, is sharded; None: no copy."""
        return None

    def update_shards(self, param: Param) -> tuple[str, ...]:
        """Axes over which the update of `param` is sharded: by default those of the optimizer states."""
        return self.shards_at_rest("optimizer", param)

    def buffer_bytes(self, job: Any) -> int:
        """Bytes of buffers of the scheme on every rank that live through the whole step."""
        return 0

    @property
    def accumulates_by_unit(self) -> bool:
        """Whether every unit runs all micro-batches of a step before the next unit does."""
        return False

    def shard_sizes(self, axis: str, memory: Sequence[float]) -> Sequence[float] | None:
        """Relative sizes of the shards of states that ranks of several kinds hold along an axis; None: all equal.

        memory: of the GPUs of each kind [bytes].
        """
        return None

    def with_shards(self, axis: str, largest: float, own: float) -> Scheme:
        """The scheme on ranks whose shards of states along `axis` are `own` times the mean, the largest `largest`."""
        return self

    def shard_size(self, axes: Sequence[str]) -> float:
        """The size of its ranks' shards over `axes`, over that of equal shards."""
        return 1.0

    @property
    def unsynchronised_axes(self) -> tuple[str, ...]:
        """Axes along which ranks take steps of their own, without gradient reduction."""
        return ()

    @property
    def period(self) -> int:
        """Steps from one run of its periodic ops (`Op.when`) to the next."""
        return 1

    @property
    def steps(self) -> int:
        """Steps that differ and are forecast one after another; 1: all steps are alike."""
        return 1

    def at_step(self, step: int) -> Scheme:
        """The scheme in one of these steps; by default as it is."""
        return self

    def closed_forms(self, setting: Any) -> Iterable[ClosedForm]:
        """Formulas of its paper that must hold at `setting` (see tests/contract) under ideal costs."""
        return ()

    @property
    def use(self) -> str:
        """Name of the scheme in a plan, ``family/name``."""
        return f"{self.family}/{self.name}"


class TensorScheme(Scheme):
    """Base class of tensor parallelism."""

    family = "tensor"


class SequenceScheme(Scheme):
    """Base class of sequence and context parallelism."""

    family = "sequence"
    takes_projected_keys = False


class MemoryScheme(Scheme):
    """Base class of recomputation and offloading, which have no axes."""

    family = "memory"
    most_axes = 0
