"""The job file: what to forecast, in short or long form, read and checked.

`load_job` turns a YAML or JSON file (or a mapping) into a `Job`; ``simulator.plan.plan`` turns its plan into a mesh
and schemes. The long form, with every default filled, is the ``job`` of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

from hardware import Cluster
from simulator.job.framework import Format, Framework, QuantisedRecipe
from simulator.job.published import Published
from simulator.models.adapters import Adapters, Target
from simulator.models.model import Model

Count = Annotated[int, Field(strict=True, gt=0, le=1_000_000_000)]
"""A degree, a batch, a number of tokens. The ceiling is far above any job and catches slipped digits."""


class JobPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _short_for(key: str, given: Any) -> BeforeValidator:
    """A single word stands for a mapping with that one key. told: the types of both forms."""
    return BeforeValidator(
        lambda given: {key: given} if isinstance(given, str) else given, json_schema_input_type=given
    )


class Batch(JobPart):
    """Sequences of one step: of the whole job, of one replica and pass; and their tokens."""

    total: Count | None = Field(default=None, alias="global")
    """Default: one micro-batch a replica without a pipeline, four a stage with one."""
    micro: Count = 1
    sequence: Count | None = None
    """Default: the model's own."""


class Precision(JobPart):
    """Number formats; what is not given is the framework's habit."""

    compute: Literal[Format, QuantisedRecipe] | None = None
    """Of the linear layers' products; below 16 bits everything else computes in bf16."""
    gradients: Format | None = None
    main_weights: Format | None = None
    moments: Format | None = None


class FrameworkChoice(JobPart):
    name: str = "megatron-core"
    release: str | None = None
    set: dict[str, Any] = {}


class SchemeEntry(BaseModel):
    """One scheme of a long plan; further keys are its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    use: str
    over: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda given: (given,) if isinstance(given, str) else given, json_schema_input_type=str | tuple[str, ...]
        ),
    ] = ()
    """One axis of the mesh, or several."""


class ShortPlan(JobPart):
    """A first plan: degrees, and the documented default scheme for each axis."""

    tp: Count = 1
    """Tensor parallel: megatron-sp, or megatron when sequence_parallel is false."""
    pp: Count = 1
    """Pipeline stages."""
    dp: Count | None = None
    """Default: what is left of the GPUs."""
    cp: Count = 1
    """Context parallel: sequence/all-gather."""
    ep: Count = 1
    """Ranks that the experts are spread over, among all of a pipeline stage: expert/all-to-all."""
    etp: Count | None = None
    """Ranks that divide each expert. Default: 1 where experts are spread, else tp."""
    schedule: str | None = None
    """Default: 1f1b, or interleaved-1f1b when chunks > 1."""
    chunks: Count | None = None
    """Virtual stages a device. Default: as many as the schedule needs."""
    zero: Literal[0, 1, 2, 3] = 1
    """0: data/ddp. From 1 on: data/zero-1 to data/zero-3."""
    fsdp: bool = False
    """data/fsdp, whatever `zero` says."""
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = True
    partition: str | tuple[int, ...] = "even"


class LongPlan(JobPart):
    mesh: dict[str, Count]
    """Axis names to sizes, outermost (slowest links) first."""
    views: dict[Literal["experts"], dict[str, Count]] = {}
    """A second reading of the ranks of one pipeline stage, for the experts: edp, ep, etp."""
    schemes: tuple[SchemeEntry, ...] = ()
    """Outermost first."""
    partition: str | tuple[int, ...] = "even"


class RunLength(JobPart):
    tokens: float | None = Field(default=None, strict=True, gt=0, le=1e20, allow_inf_nan=False)
    price_per_gpu_hour: float | None = Field(default=None, strict=True, ge=0, le=1e9, allow_inf_nan=False)


class Train(JobPart):
    """What is trained: all, or adapters beside frozen weights."""

    mode: Literal["full", "lora"] = "full"
    rank: Count | None = None
    """Of the adapters. Default: 16."""
    targets: tuple[Target, ...] | None = None
    """Linears that get an adapter. Default: all of them."""


class Noise(JobPart):
    """How ranks differ from each other, and steps: what a step takes is played rank by rank then."""

    jitter: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)
    """Standard deviation of the logarithm of how long a rank's kernels take, drawn for every rank and action."""
    stragglers: float = Field(default=0.0, ge=0, le=1)
    """Share of the ranks that are slow in every action."""
    slow: float = Field(default=1.0, ge=1, le=1000)
    """How many times longer the kernels of a straggler take."""
    seed: int = Field(default=0, strict=True, ge=0)
    steps: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """Steps played, one after another."""


def _has_keys(given: Any) -> Any:
    """Refuses a plan that is no mapping, whose keys depend on its form."""
    if not isinstance(given, Mapping):
        long = ", ".join(LongPlan.model_fields)
        raise ValueError(f"must be a mapping of keys to values. Keys: {', '.join(ShortPlan.model_fields)}; or {long}")
    return given


class JobFile(JobPart):
    """The keys of a job file."""

    id: StrictStr | StrictInt | None = None
    model: Any
    cluster: Any
    framework: Annotated[FrameworkChoice, _short_for("name", str | FrameworkChoice)] = FrameworkChoice()
    batch: Batch = Batch()
    precision: Annotated[Precision, _short_for("compute", Literal[Format, QuantisedRecipe] | Precision)] = Precision()
    optimizer: Literal["adam"] = "adam"
    train: Train = Train()
    plan: Annotated[dict[str, Any], BeforeValidator(_has_keys)] = {}
    run: RunLength = RunLength()
    noise: Noise | None = None
    published: Published | None = None
    """What somebody measured of this run, to stand beside the forecast."""


class Job(JobPart):
    """A job whose model, cluster and framework are found, and whose plan is in long form."""

    id: str | int | None
    model: Model
    cluster: Cluster
    framework: Framework
    release: str | None
    batch: Batch
    precision: Precision
    train: Train = Train()
    plan: LongPlan
    run: RunLength
    noise: Noise | None = None
    published: Published | None = None
    as_written: dict[str, Any]
    """model, cluster and framework.set as the user wrote them."""
    origin: tuple[str, str] = ("", "")
    """The file it was read from and its text; errors name the line."""

    @property
    def adapters(self) -> Adapters | None:
        """What is trained where not all is."""
        if self.train.rank is None or self.train.targets is None:
            return None
        return Adapters(self.train.rank, self.train.targets)

    def to_dict(self) -> dict[str, Any]:
        """The job in long form, every default filled."""
        plan = self.plan.model_dump(mode="json", exclude={"schemes"} if self.plan.views else {"schemes", "views"})
        plan["schemes"] = [
            {
                "use": entry.use,
                **({"over": _one_or_more(entry.over)} if entry.over else {}),
                **(entry.model_extra or {}),
            }
            for entry in self.plan.schemes
        ]
        return {
            "model": self.as_written["model"],
            "cluster": self.as_written["cluster"],
            "framework": {"name": self.framework.name, "release": self.release, "set": self.as_written["set"]},
            "batch": self.batch.model_dump(by_alias=True),
            "precision": self.precision.model_dump(),
            "optimizer": "adam",
            **({"train": self.train.model_dump(mode="json")} if self.adapters else {}),
            "plan": plan,
            "run": self.run.model_dump(),
            **({"noise": self.noise.model_dump()} if self.noise else {}),
            **({"published": self.published.model_dump(exclude_none=True)} if self.published else {}),
        }


def _one_or_more(axes: tuple[str, ...]) -> str | list[str]:
    return axes[0] if len(axes) == 1 else list(axes)
