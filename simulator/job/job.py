"""The schema of a job file, and the checked `Job` with its plan in long form.

``simulator.job.load`` turns a YAML or JSON file or a mapping into a `Job`; ``simulator.plan.resolve`` turns its plan
into a mesh and schemes. The long form, with every default filled, is the ``job`` of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

from hardware import Cluster
from simulator.job.framework import Format, Framework, QuantisedRecipe
from simulator.job.published import Published
from simulator.models.adapters import Adapters, Target
from simulator.models.model import Model

Count = Annotated[int, Field(strict=True, gt=0, le=1_000_000_000)]
"""A parallel degree, a batch size, a number of tokens. The ceiling is far above any job and catches typing errors."""


class JobPart(BaseModel):
    """Base class of the parts of a job; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _short_for(key: str, given: Any) -> BeforeValidator:
    """A single word is short for a mapping with that one key. given: the types of both forms."""
    return BeforeValidator(
        lambda given: {key: given} if isinstance(given, str) else given, json_schema_input_type=given
    )


class Batch(JobPart):
    """Batch sizes in sequences (global batch of a step, micro-batch of a replica), and tokens of a sequence."""

    total: Count | None = Field(default=None, alias="global")
    """Default: one micro-batch per replica; with a pipeline four per stage."""
    micro: Count = 1
    sequence: Count | None = None
    """Default: the sequence length of the model."""
    documents: Count | tuple[Count, ...] | None = None
    """Tokens of the documents packed into a sequence, one length or a sample of lengths: attention stays within a
    document. Default: one document a sequence."""

    @property
    def document(self) -> int | None:
        """Length of the documents that have as many pairs of tokens: the mean over tokens; None: whole sequences."""
        if self.documents is None:
            return None
        lengths = self.documents if isinstance(self.documents, tuple) else (self.documents,)
        cut = [min(length, self.sequence or length) for length in lengths]
        return round(sum(length * length for length in cut) / sum(cut))


class Precision(JobPart):
    """Number formats; defaults are those of the framework."""

    compute: Literal[Format, QuantisedRecipe] | None = None
    """Format of the GEMMs of linear layers; below 16 bits everything else is in bf16."""
    gradients: Format | None = None
    main_weights: Format | None = None
    moments: Format | None = None


class FrameworkChoice(JobPart):
    """A framework by name, with changes to its fields."""

    name: str = "megatron-core"
    release: str | None = None
    """Month ("2023-06"), NVIDIA container ("24.05") or version of the code; its traits are those of that time. Default:
    the newest that the profile describes."""
    set: dict[str, Any] = {}


class SchemeEntry(BaseModel):
    """One scheme of a plan in long form; further keys are its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    use: str
    over: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda given: (given,) if isinstance(given, str) else given, json_schema_input_type=str | tuple[str, ...]
        ),
    ] = ()
    """One or several axes of the mesh."""


class ShortPlan(JobPart):
    """A plan in short form: parallel degrees, with the documented default scheme for each axis."""

    tp: Count = 1
    """Tensor parallel: megatron-sp, or megatron when sequence_parallel is false."""
    pp: Count = 1
    """Pipeline stages."""
    dp: Count | None = None
    """Default: GPUs / (tp pp cp)."""
    cp: Count = 1
    """Context parallel: sequence/all-gather."""
    ep: Count = 1
    """Expert parallel, over the ranks of a pipeline stage: expert/all-to-all."""
    etp: Count | None = None
    """Expert tensor parallel. Default: 1 with expert parallelism, else tp."""
    schedule: str | None = None
    """Default: 1f1b, or interleaved-1f1b when chunks > 1."""
    chunks: Count | None = None
    """Virtual stages per device. Default: that of the schedule."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage; 0: data/ddp, 1 to 3: data/zero-1 to data/zero-3."""
    fsdp: bool = False
    """Use data/fsdp in place of `zero`."""
    recompute: Literal["none", "selective", "full"] = "none"
    sequence_parallel: bool = True
    partition: str | tuple[int, ...] = "even"
    pad_heads: bool = False
    """See `LongPlan.pad_heads`."""


class LongPlan(JobPart):
    """A plan in long form: axes of the mesh, and the schemes over them."""

    mesh: dict[str, Count]
    """Sizes of the axes by name, outermost (slowest links) first."""
    views: dict[Literal["experts"], dict[str, Count]] = {}
    """Other axes over the ranks of one pipeline stage, for the experts: edp, ep, etp."""
    schemes: tuple[SchemeEntry, ...] = ()
    """Outermost first."""
    partition: str | tuple[int, ...] = "even"
    pad_heads: bool = False
    """Heads that the ranks do not divide are padded with dummy heads, which are computed and stored like the others
    (`simulator.models.model.Model.pad_heads`). Default: they are refused."""


class RunLength(JobPart):
    """Length and price of a training run: tokens, and money per GPU and hour."""

    tokens: float | None = Field(default=None, strict=True, gt=0, le=1e20, allow_inf_nan=False)
    price_per_gpu_hour: float | None = Field(default=None, strict=True, ge=0, le=1e9, allow_inf_nan=False)


class Train(JobPart):
    """Which parameters are trained: all, those of adapters only, or none."""

    mode: Literal["full", "lora", "forward-only"] = "full"
    """forward-only: a step runs forward passes alone, as for evaluation."""
    rank: Count | None = None
    """Rank of the adapters. Default: 16."""
    targets: tuple[Target, ...] | None = None
    """Linear layers with an adapter. Default: all."""


class Noise(JobPart):
    """Differences between ranks and steps; a step is then played rank by rank."""

    jitter: float = Field(default=0.0, ge=0, le=2, allow_inf_nan=False)
    """Standard deviation of the logarithm of kernel times, drawn for every rank and action."""
    communication_jitter: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    """The same for collectives and messages, drawn for each of them. Default: `jitter`."""
    stragglers: float = Field(default=0.0, ge=0, le=1)
    """Share of the ranks that are stragglers: slow in every action of a step."""
    persistent: bool = False
    """The same ranks are stragglers in all steps, as slow GPUs are. Default: drawn for each step."""
    slow: float = Field(default=1.0, ge=1, le=1000)
    """Kernel time of a straggler over that of the other ranks."""
    seed: int = Field(default=0, strict=True, ge=0)
    steps: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """Number of steps played, one after another."""


def _has_keys(given: Any) -> Any:
    """Refuses a plan that is not a mapping."""
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
    """A published figure of this run, to compare the forecast with."""


class Job(JobPart):
    """A job with its model, cluster and framework loaded, and its plan in long form."""

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
    """The job as the user wrote it, without what meshcast filled in; framework and precision are mappings."""
    folder: Path = Path(".")
    """Folder of the relative paths in it."""
    origin: tuple[str, str] = ("", "")
    """Path and text of the job file, from which errors get their line."""

    def __eq__(self, other: object) -> bool:
        """Whether both jobs mean the same, in whatever form they were written."""
        fields = type(self).model_fields.keys() - {"as_written", "folder"}
        return isinstance(other, Job) and all(getattr(self, name) == getattr(other, name) for name in fields)

    @property
    def adapters(self) -> Adapters | None:
        """The adapters, if they alone are trained."""
        if self.train.rank is None or self.train.targets is None:
            return None
        return Adapters(self.train.rank, self.train.targets)

    @property
    def forward_only(self) -> bool:
        """Whether a step runs forward passes alone."""
        return self.train.mode == "forward-only"

    def to_dict(self) -> dict[str, Any]:
        """The job in long form, every default filled."""
        optional = {key for key in ("views", "pad_heads") if not getattr(self.plan, key)}
        plan = self.plan.model_dump(mode="json", exclude={"schemes", *optional})
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
            "framework": {
                "name": self.framework.name,
                "release": self.release,
                "set": self.as_written["framework"].get("set", {}),
            },
            "batch": {
                key: value
                for key, value in self.batch.model_dump(by_alias=True, mode="json").items()
                if key != "documents" or value is not None
            },
            "precision": self.precision.model_dump(),
            "optimizer": "adam",
            **({"train": self.train.model_dump(mode="json", exclude_none=True)} if self.train.mode != "full" else {}),
            "plan": plan,
            "run": self.run.model_dump(),
            **({"noise": self.noise.model_dump()} if self.noise else {}),
            **({"published": self.published.model_dump(exclude_none=True)} if self.published else {}),
        }


def _one_or_more(axes: tuple[str, ...]) -> str | list[str]:
    return axes[0] if len(axes) == 1 else list(axes)
