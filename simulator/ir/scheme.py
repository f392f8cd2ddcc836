"""The base class of all parallelism schemes, and the types of its hooks.

A scheme is a published idea in a file, ``simulator/schemes/<family>/<name>.py`` (``-`` in the plan is ``_`` in the
file). It states which dim its axes shard at an operator (`layouts`), or changes how a module (`lower`) or a stage
(`lower_stage`) is lowered, or, for a pipeline, orders the actions of the devices (``simulator.scheduling.schedule``).
It also states the closed forms of its paper that must hold under ideal costs (`closed_forms`). A scheme knows shapes,
bytes, groups and order, and no seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any, ClassVar, Self

from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import Module, Operator, Stage
from meshcast.simulator.ir.ops import Fragment, StageOps

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

    quantity: name of a quantity that the contract measures (`validation.contract`).
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
        `simulator.ir.layout`); empty: none, also where a scheme further out shards any.
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
    a module or a stage), `closed_forms`; seldom by `check_job`, `assumptions`, `axis_sizes`, `lowering_key`. What a few
    schemes can do beyond that is in `simulator.ir.capabilities`.

    Attributes:
        name: name of the scheme in a plan, from the name of its file.
        axes: its axes, in the order of its paper.
        over: the parts of its axes (see `Mesh`).
        options: its options.
        mesh: the device mesh.
        framework: what it reads of the framework that it runs in (`SchemeTraits`).
        sequence_axes: parts of the axes of sequence parallelism, along which ranks hold the same weights and other
            tokens.
        pipelined: whether the plan divides the model among the stages of a pipeline that flushes after each step.
    """

    family: ClassVar[str]
    role: ClassVar[str] = ""
    """A role that only a single scheme of a plan can have, in words for users (``pipeline schedule``); empty: none."""
    least_axes: ClassVar[int] = 0
    most_axes: ClassVar[int | None] = None
    """Least and largest number of its axes; None: any number."""
    names_axes: ClassVar[tuple[str, ...]] = ()
    """Options that name further axes, after those of `over`."""
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
    def all_axes(cls, over: Sequence[str], options: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns all axes of a scheme: those of `over`, and those that its options name.

        options: the options as the plan gives them.
        """
        named = (options.get(option) for option in cls.names_axes)
        return (*over, *(axis for axis in named if axis))

    @classmethod
    def axis_sizes(cls, ranks: int, near: int) -> list[tuple[int, ...]]:
        """Returns the sizes of its axes over so many ranks, as far as they follow from this number: that which is
        meant, several among which a plan has to choose, or none.

        near: how many neighbours of these ranks share a node.
        """
        return [(ranks,)] if cls.least_axes < 2 else []

    @cached_property
    def view(self) -> str:
        """The view of the mesh that has its axes; empty for the mesh itself."""
        return self.mesh.view_of(self.axes[0]) if self.axes else ""

    def assumptions(self, model: Any) -> Iterable[str]:
        """Returns assumptions about the run that reports list, in words for users."""
        return ()

    def check_job(self, job: Any) -> None:
        """Raises PlanError if the job has something that the scheme does not support."""

    def with_options(self, **options: Any) -> Self:
        """Returns the scheme with some other options."""
        changed = self.options.model_copy(update=options)
        return type(self)(self.axes, changed, self.mesh, self.framework, self.sequence_axes, self.pipelined)

    def layouts(self, operator: Operator) -> str | Rule | None:
        """Returns how it shards an operator: the dim that all its axes shard, or a `Rule` where they differ; None: as
        without the scheme."""
        return None

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        """Returns the ops of a module; ``inner(module)`` lowers it under the schemes further in."""
        return inner(module)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        """Returns the ops of a stage; ``inner(stage)`` lowers it under the schemes further in."""
        return inner(stage)

    @property
    def lowering_key(self) -> Hashable:
        """A key that is equal for schemes under which every unit lowers to the same ops."""
        parts = tuple(self.mesh.parts(axis) for axis in self.axes)
        return self.use, parts, tuple(self.mesh.size(axis) for axis in self.over), self.options

    def closed_forms(self, setting: Any) -> Iterable[ClosedForm]:
        """Returns formulas of its paper that must hold at `setting` (`validation.contract`) under ideal costs."""
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


RECOMPUTES = "recompute scheme"
"""The role of schemes that compute activations again, and the mark of the units that they do it for."""


class MemoryScheme(Scheme):
    """Base class of recomputation and offloading, which have no axes."""

    family = "memory"
    most_axes = 0
