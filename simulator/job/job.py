"""The schema of a job file, and the checked `Job` with its plan in long form.

``simulator.loading.load`` turns a YAML or JSON file or a mapping into a `Job`; ``simulator.plan.resolve`` turns its
plan into a mesh and schemes. The long form, with every default filled, is the ``job`` of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, model_validator

from meshcast.hardware import Cluster
from meshcast.simulator.job.batch import Batch, ClassOrder, Count, JobPart
from meshcast.simulator.job.framework import Format, Framework, QuantisedRecipe
from meshcast.simulator.job.published import Published
from meshcast.simulator.job.run_keys.keys import (
    CheckpointKind,
    Checkpoints,
    DataStalls,
    Evaluation,
    Failures,
    Recovery,
    RunStragglers,
    refuse_two_lengths,
    short_for,
)
from meshcast.simulator.models.adapters import Adapters, Target
from meshcast.simulator.models.model import Model


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

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    use: str
    over: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda given: (given,) if isinstance(given, str) else given, json_schema_input_type=str | tuple[str, ...]
        ),
    ] = ()
    """One or several axes of the mesh."""


def _refuse_flag(given: Any) -> Any:
    """Refuses true and false where words say how much is recomputed."""
    if isinstance(given, bool):
        raise ValueError("words say what is recomputed. Write none, selective or full, or modules like [norm, act]")
    return given


class ShortStage(JobPart):
    """The ranks of a pipeline stage in short form: parallel degrees, with the default scheme for each axis."""

    tp: Count = 1
    """Tensor parallel: megatron-sp, or megatron when sequence_parallel is false."""
    dp: Count | None = None
    """Default: GPUs / (tp pp cp); 1 in an entry of `stages`."""
    cp: Count = 1
    """Context parallel: sequence/all-gather."""
    ep: Count = 1
    """Expert parallel, over the ranks of a pipeline stage: expert/all-to-all."""
    etp: Count | None = None
    """Expert tensor parallel. Default: 1 with expert parallelism, else tp."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage; 0: data/ddp, 1 to 3: data/zero-1 to data/zero-3."""
    fsdp: bool = False
    """Use data/fsdp in place of `zero`."""
    shard: Count | None = None
    """Data-parallel ranks that share one copy of what is sharded over them; the other dp / shard hold copies of it
    (hybrid sharding, the option `replicate` of data/fsdp and data/zero-1). Default: all of them."""
    recompute: Annotated[Literal["none", "selective", "full"] | tuple[str, ...], BeforeValidator(_refuse_flag)] = "none"
    """selective: the attention core; or a list of the modules that memory/recompute-selective recomputes."""
    recompute_layers: Count | None = None
    """Layers of each stage, from the first on, that are recomputed with `recompute: full`. Default: all."""
    offload: tuple[Literal["activations", "optimizer"], ...] = ()
    """What is kept in host memory: memory/offload."""
    sequence_parallel: bool = True
    tp_scheme: str | dict[str, Any] | None = None
    """Tensor scheme by its name, such as summa-2d, or ``use:`` with its options, as the next three may be, where tp is
    above 1; or one that overlaps the communication of tensor/megatron-sp or tensor/megatron, such as async-tp. Default:
    see `tp`."""
    cp_scheme: str | dict[str, Any] | None = None
    """Sequence scheme by its name, such as ulysses, where cp is above 1. Default: all-gather."""
    ep_scheme: str | dict[str, Any] | None = None
    """Expert scheme by its name, such as deepep. Default: all-to-all."""
    dp_scheme: str | dict[str, Any] | None = None
    """Data scheme by its name, such as mics, in place of `zero` and `fsdp`."""
    reshard: bool | None = None
    """Of data/fsdp: whether weights are freed between the forward and the backward pass. Default: they are."""
    unit: Count | None = None
    """Of data/fsdp: layers whose weights are gathered together. Default: 1."""
    prefetch: Annotated[int, Field(strict=True, ge=0, le=3)] | None = None
    """Of data/fsdp: units gathered ahead of the one that computes. Default: 1 where the framework overlaps, else 0."""


LayerCount = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
"""Layers of a stage."""


class ShortStageEntry(ShortStage):
    """An entry of `stages` in short form."""

    layers: LayerCount | tuple[LayerCount, ...] | None = None
    """See `StagePlan.layers`."""


class Replicas(JobPart):
    """Data-parallel replicas that are alike, in a plan with others that run another number of micro-batches."""

    dp: Count = 1
    """Number of them: positions along the outermost data-parallel axis. 1 with `stages`."""
    microbatches: Count | ClassOrder | None = None
    """Micro-batches that each of them runs in a step: their number or, with `batch.lengths`, their classes in the order
    in which they run. Default with `share: by-speed`."""
    stages: tuple[dict[str, Any], ...] = ()
    """Stages with degrees of their own, as in a plan; the ranks of the replicas follow each other."""


class ShortPlan(ShortStage):
    """A plan in short form: parallel degrees, with the documented default scheme for each axis."""

    pp: Count = 1
    """Pipeline stages."""
    schedule: str | dict[str, Any] | None = None
    """Name of the schedule, or ``use:`` with its options. Default: 1f1b, or interleaved-1f1b when chunks > 1."""
    chunks: Count | None = None
    """Virtual stages per device. Default: that of the schedule."""
    partition: str | tuple[int, ...] = "even"
    order: Literal["pp-dp-cp-tp", "dp-pp-cp-tp"] = "pp-dp-cp-tp"
    """The axes of the mesh, outermost (slowest links) first; dp is both axes of hybrid sharding, and tp the ranks of a
    matrix in either. dp-pp-cp-tp: replicas on other nodes, stages next to each other (`--use-tp-pp-dp-mapping` of
    Megatron-LM)."""
    pad_heads: bool = False
    """See `LongPlan.pad_heads`."""
    stages: tuple[dict[str, Any], ...] = ()
    """Degrees of every pipeline stage, in place of `pp`; keys that a stage leaves out are those of the plan."""
    replicas: tuple[Replicas, ...] = ()
    """See `LongPlan.replicas`."""
    share: Literal["even", "by-speed"] = "even"
    """See `LongPlan.share`."""


class StageMesh(JobPart):
    """Ranks with axes of their own, and the schemes over them."""

    mesh: dict[str, Count]
    """Sizes of the axes by name, outermost (slowest links) first."""
    views: dict[Literal["experts"], dict[str, Count]] = {}
    """Other axes over the ranks of one pipeline stage, for the experts: edp, ep, etp."""
    schemes: tuple[SchemeEntry, ...] = ()
    """Outermost first."""


class StagePlan(StageMesh):
    """The ranks of one pipeline stage in long form. Their numbers follow those of the stage before."""

    layers: LayerCount | tuple[LayerCount, ...] | None = None
    """Layers of the stage; with chunks, of all of them together or of each. Default: those of `LongPlan.partition`."""


class ReplicaPlan(JobPart):
    """Data-parallel replicas that are alike, in long form; see `Replicas`."""

    dp: Count = 1
    microbatches: Count | ClassOrder | None = None
    stages: tuple[StagePlan, ...] = ()

    @property
    def count(self) -> int | None:
        """Number of micro-batches that each of them runs; None: found by speed."""
        return len(self.microbatches) if isinstance(self.microbatches, tuple) else self.microbatches


class LongPlan(StageMesh):
    """A plan in long form: axes of the mesh, and the schemes over them."""

    partition: str | tuple[int, ...] = "even"
    pad_heads: bool = False
    """Heads that the ranks do not divide are padded with dummy heads, which are computed and stored like the others
    (`simulator.models.model.Model.pad_heads`). Default: they are refused."""
    stages: tuple[StagePlan, ...] = ()
    """Pipeline stages with degrees of their own; `mesh` has then the axis of the pipeline alone."""
    replicas: tuple[ReplicaPlan, ...] = ()
    """Kinds of data-parallel replicas that run unlike numbers of micro-batches, or have stages of their own."""
    share: Literal["even", "by-speed"] = "even"
    """by-speed: replicas on every kind of node get as many micro-batches as make them finish together."""

    @property
    def has_stages(self) -> bool:
        """Whether stages have degrees of their own."""
        return bool(self.stages) or any(one.stages for one in self.replicas)

    def with_schemes(self, change: Callable[[StageMesh], tuple[SchemeEntry, ...]]) -> LongPlan:
        """The plan with other schemes, wherever it has some. change: the schemes of one mesh."""

        def change_one(one: Any) -> Any:
            return one.model_copy(update={"schemes": change(one)})

        stages = tuple(change_one(one) for one in self.stages)
        replicas = tuple(
            one.model_copy(update={"stages": tuple(change_one(stage) for stage in one.stages)}) for one in self.replicas
        )
        return change_one(self).model_copy(update={"stages": stages, "replicas": replicas})  # type: ignore[no-any-return]


class RunLength(JobPart):
    """Length, price and electricity of a training run, and what ``meshcast run`` simulates of it."""

    tokens: float | None = Field(default=None, strict=True, gt=0, le=1e20, allow_inf_nan=False)
    """Tokens to train on. Default: unknown, and no days, energy or money are forecast."""
    price_per_gpu_hour: float | None = Field(default=None, strict=True, ge=0, le=1e9, allow_inf_nan=False)
    """Money for a GPU and hour, in any currency."""
    pue: float | None = Field(default=None, strict=True, ge=1, le=5, allow_inf_nan=False)
    """Power usage effectiveness: power of the data centre over that of its computers. Default: 1.2."""
    node_watts_per_gpu: float | None = Field(default=None, strict=True, ge=0, le=1e5, allow_inf_nan=False)
    """Power of a node beside its GPUs (CPUs, memory, network, fans) and of its switches, for each GPU [W]. Default:
    half of the power limit of a GPU."""
    carbon_kg_per_kwh: float | None = Field(default=None, strict=True, ge=0, le=5, allow_inf_nan=False)
    """CO2 of a kilowatt-hour of electricity [kg]. Default: unknown, and no CO2 is forecast."""
    steps: Annotated[int, Field(strict=True, gt=0, le=1_000_000_000)] | None = None
    """Length of a simulated run in steps, in place of `tokens`."""
    days: float | None = Field(default=None, strict=True, gt=0, le=3650, allow_inf_nan=False)
    """Days after which a simulated run ends, whatever it has reached."""
    seeds: Annotated[int, Field(strict=True, gt=0, le=1_000_000)] | None = None
    """Number of simulated runs, each with random numbers of its own. Default: 32."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    """Of all their random numbers. Default: 0."""
    failures: Annotated[Failures | None, short_for("rates", str | Failures | None)] = None
    """Default: the rates of the catalog's llama3-405b."""
    checkpoints: Annotated[Checkpoints | None, short_for("kind", CheckpointKind | Checkpoints | None)] = None
    """Default: asynchronous."""
    recovery: Recovery | None = None
    stragglers: RunStragglers | None = None
    evaluation: Evaluation | None = None
    data_stalls: DataStalls | None = None

    @model_validator(mode="after")
    def _check_length(self) -> RunLength:
        refuse_two_lengths(self.model_dump(include={"tokens", "steps"}))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Tokens and price, and what is stated of electricity."""
        stated = self.model_dump(mode="json", exclude_none=True)
        return {"tokens": None, "price_per_gpu_hour": None, **stated}


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
    framework: Annotated[FrameworkChoice, short_for("name", str | FrameworkChoice)] = FrameworkChoice()
    batch: Batch = Batch()
    precision: Annotated[Precision, short_for("compute", Literal[Format, QuantisedRecipe] | Precision)] = Precision()
    optimizer: Literal["adam"] = "adam"
    train: Train = Train()
    plan: Annotated[dict[str, Any], BeforeValidator(_has_keys)] = {}
    run: RunLength = RunLength()
    noise: Noise | None = None
    published: Published | None = None
    """A published figure of this run, to compare the forecast with."""


class JobOrigin(NamedTuple):
    """Where a job was read.

    where, text: path and text of the job file. places: of a launch file, the setting behind each key of the job.
    """

    where: str = ""
    text: str = ""
    places: Mapping[str, str] = {}


NO_FILE = JobOrigin()
"""The origin of a job that is a mapping."""


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
    step: int = 0
    """The step that is forecast, where steps differ (`Scheme.steps`)."""
    origin: JobOrigin = NO_FILE
    """The file of the job, from which errors get their line."""

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
        return {
            "model": self.as_written["model"],
            "cluster": self.as_written["cluster"],
            "framework": {
                "name": self.framework.name,
                "release": self.release,
                "set": self.as_written["framework"].get("set", {}),
            },
            "batch": self.batch.to_dict(),
            "precision": self.precision.model_dump(),
            "optimizer": "adam",
            **({"train": self.train.model_dump(mode="json", exclude_none=True)} if self.train.mode != "full" else {}),
            "plan": plan_to_dict(self.plan),
            "run": self.run.to_dict(),
            **({"noise": self.noise.model_dump()} if self.noise else {}),
            **({"published": self.published.model_dump(exclude_none=True)} if self.published else {}),
        }


def plan_to_dict(plan: LongPlan | StagePlan) -> dict[str, Any]:
    """A plan, or a stage of one, without what it does not use."""
    optional = {key for key in ("views", "pad_heads", "stages", "replicas") if not getattr(plan, key, True)}
    optional |= {key for key, idle in (("share", "even"), ("layers", None)) if getattr(plan, key, idle) == idle}
    found = plan.model_dump(mode="json", exclude={"schemes", *optional})
    found["schemes"] = [
        {"use": entry.use, **({"over": _one_or_more(entry.over)} if entry.over else {}), **(entry.model_extra or {})}
        for entry in plan.schemes
    ]
    if isinstance(plan, LongPlan) and plan.stages:
        found["stages"] = [plan_to_dict(stage) for stage in plan.stages]
    if isinstance(plan, LongPlan) and plan.replicas:
        found["replicas"] = [
            one.model_dump(mode="json", exclude={"stages"}, exclude_none=True)
            | ({"stages": [plan_to_dict(stage) for stage in one.stages]} if one.stages else {})
            for one in plan.replicas
        ]
    return found


def _one_or_more(axes: tuple[str, ...]) -> str | list[str]:
    return axes[0] if len(axes) == 1 else list(axes)
