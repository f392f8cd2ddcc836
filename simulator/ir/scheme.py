"""What a parallelism scheme is, and how one is found.

A scheme is one published idea in one file, ``simulator/schemes/<family>/<name>.py`` (``-`` in the plan is ``_`` in the
file). It states which dim its axes divide at a site (`layouts`), or what happens there (`lower`, wrapping all that is
nested in it; `lower_stage`, around a whole stage), or, for a pipeline, an order of actions (see
``simulator.scheduling.schedule``); and the closed forms that must come out under ideal costs (`closed_forms`). It
speaks of shapes, bytes, groups and order only, and never of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from simulator.ir.mesh import Mesh
from simulator.ir.modules import Module, Operator, Stage
from simulator.ir.ops import Fragment, Param, StageOps

FAMILIES = ("pipeline", "tensor", "sequence", "expert", "data", "memory")
SHORT = {"pipeline": "pp", "tensor": "tp", "sequence": "cp", "expert": "ep", "data": "dp", "memory": "copy"}
"""The word under which reports file the communication of a family."""


@dataclass(frozen=True)
class Paper:
    """Where an idea was published: arXiv number or DOI, title, year."""

    ref: str
    title: str
    year: int


@dataclass(frozen=True)
class ClosedForm:
    """A closed form: `quantity` (a name the contract suite can measure, see tests/contract) must equal `value`."""

    quantity: str
    value: Any
    where: str


@dataclass(frozen=True)
class Rule:
    """What a scheme does with a site; a plain dim name means ``Rule(divide={each of my axes: that dim})``.

    divide: which dim an axis divides; ``b|h``: samples, and `h` of the tensors that have none (see
    `simulator.ir.layout`).
    rest: which dim of the weights an axis cuts while nobody uses them: they are gathered before their use, and their
    gradients scattered behind it.
    """

    divide: Mapping[str, str] = field(default_factory=dict)
    at_rest: Mapping[str, str] = field(default_factory=dict)


LowerModule = Callable[[Module], Fragment]
LowerStage = Callable[[Stage], StageOps]


class SchemeOptions(BaseModel):
    """A scheme without knobs; schemes with some derive from this."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Scheme:
    """Base of all schemes.

    claims: its axes, in the order its paper uses; over: their parts (see `Mesh`). mesh, habits: where it runs and the
    framework's habits. beside: parts of other schemes' axes along which ranks hold the same weights and other tokens.
    name: the plan's name of its file.
    """

    family: ClassVar[str]
    role: ClassVar[str] = ""
    """What only one scheme of a plan can be, in words for a person (``pipeline schedule``)."""
    required_roles: ClassVar[tuple[str, ...]] = ()
    """Roles without which a plan with it makes no sense."""
    least_axes: ClassVar[int] = 0
    most_axes: ClassVar[int | None] = None
    """Axes that it claims at least and at most; None: any number."""
    names_axes: ClassVar[tuple[str, ...]] = ()
    """Options that name further axes of its own, claimed behind those that it is `over`."""
    updates_weights: ClassVar[bool] = True
    """Weights that rest cut are those that the optimizer updates, in its format; otherwise it has a copy of its own."""
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
    ) -> None:
        self.axes = tuple(over)
        self.options: Any = options if options is not None else self.Options()
        self.mesh = mesh if mesh is not None else Mesh({})
        self.over = self.mesh.parts(self.axes)
        self.framework = framework
        self.sequence_axes = tuple(sequence_axes)

    @classmethod
    def all_axes(cls, over: Sequence[str], told: Mapping[str, Any]) -> tuple[str, ...]:
        """All axes that a scheme of a plan claims: those it is `over`, and those that its options name."""
        named = (told.get(option) for option in cls.names_axes)
        return (*over, *(axis for axis in named if axis))

    @property
    def view(self) -> str:
        """The view of the mesh that its axes belong to; empty for the mesh itself."""
        return self.mesh.view_of(self.axes[0]) if self.axes else ""

    def adapt_model(self, model: Any) -> Any:
        """The model as the plan runs it."""
        return model

    def assumptions(self, model: Any) -> Iterable[str]:
        """What it takes for granted of a run, in words for a person."""
        return ()

    def check_job(self, job: Any) -> None:
        """Raises PlanError where the job has something that the scheme cannot do."""

    def layouts(self, operator: Operator) -> str | Rule | None:
        """Which dim my axes divide here; None: I leave this site whole."""
        return None

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        """What happens here; ``inner(site)`` is everything nested in me."""
        return inner(module)

    def lower_stage(self, stage: Stage, inner: LowerStage) -> StageOps:
        """What happens around a whole stage; ``inner(stage)`` is the chain of its units, each lowered by itself."""
        return inner(stage)

    @property
    def lowering_key(self) -> Hashable:
        """Equal for schemes under which a unit lowers to the same ops."""
        parts = tuple(self.mesh.parts(axis) for axis in self.axes)
        return self.use, parts, tuple(self.mesh.size(axis) for axis in self.over), self.options

    def reduces(self, param: Param) -> tuple[str, ...]:
        """Axes over which I sum the gradient of `param`; what no scheme sums is summed at the update."""
        return ()

    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        """Axes over which `state` (parameters, gradients, optimizer) of `param` is cut while it rests in memory."""
        return ()

    def offloads(self, state: str) -> bool:
        """Whether `state` rests outside of the GPU's memory."""
        return False

    def secondary_shards(self, param: Param) -> tuple[str, ...] | None:
        """Axes over which a second copy of cut weights rests cut, in the format that they compute in; None: no copy."""
        return None

    def update_shards(self, param: Param) -> tuple[str, ...]:
        """Axes over which ranks share the update of `param`, each with a part of it: by default those over which the
        optimizer's states rest cut."""
        return self.shards_at_rest("optimizer", param)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of my own on every rank that live through the whole step."""
        return 0

    @property
    def unsynchronised_axes(self) -> tuple[str, ...]:
        """Axes along which ranks take steps of their own, and sum no gradients."""
        return ()

    @property
    def period(self) -> int:
        """How many steps come round for each in which its ops of a period (`Op.when`) run."""
        return 1

    def closed_forms(self, setting: Any) -> Iterable[ClosedForm]:
        """Closed forms that must hold at `setting` under ideal costs."""
        return ()

    @property
    def use(self) -> str:
        """Its name in a plan, ``family/name``."""
        return f"{self.family}/{self.name}"


class TensorScheme(Scheme):
    family = "tensor"


class SequenceScheme(Scheme):
    family = "sequence"


class MemoryScheme(Scheme):
    family = "memory"
    most_axes = 0
