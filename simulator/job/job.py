"""The schema of a job file, and the checked `Job` with its plan in long form.

``simulator.loading.load`` turns a YAML or JSON file or a mapping into a `Job`; ``simulator.plan.resolve`` turns its
plan into a mesh and schemes. The long form, with every default filled, is the ``job`` of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from meshcast.hardware import GPU, Cluster
from meshcast.hardware.schemas import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)
from meshcast.simulator.job.batch import Batch, ClassOrder, Count, JobPart
from meshcast.simulator.job.counts import read_tokens
from meshcast.simulator.job.framework import Format, Framework, QuantisedRecipe, merge_fields
from meshcast.simulator.job.optimizers import OptimizerChoice, OptimizerName
from meshcast.simulator.job.plan_keys import LayerCount, ShortPlan
from meshcast.simulator.job.recipe import RecipeValue, nest_traits
from meshcast.simulator.job.run_keys import (
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
from meshcast.simulator.models.adapters import Adapters, StoredName
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
    rules: StrictBool = True
    """Whether the job means the program of this name, whose rules then count; false: the profile stands for another."""
    recipe: StrictBool = True
    """Whether a job that means a program takes what it leaves open from the program's published recipes; false: from
    the defaults of its code."""
    set: dict[str, Any] = {}


class SchemeEntry(BaseModel):
    """One scheme of a plan in long form; further keys are its options."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    use: str
    over: Annotated[
        tuple[str, ...],
        BeforeValidator(
            lambda axes: (axes,) if isinstance(axes, str) else axes, json_schema_input_type=str | tuple[str, ...]
        ),
    ] = ()
    """One or several axes of the mesh."""

    @model_validator(mode="before")
    @classmethod
    def _move_kept_results(cls, entry: Any) -> Any:
        """Reads full recompute that keeps results, in words of jobs before `memory/recompute-operators`."""
        if not (isinstance(entry, dict) and entry.get("use") == "memory/recompute-full" and entry.get("keep")):
            return entry
        save = ["attention" if word == "core_attn" else word for word in entry["keep"]]
        others = {key: value for key, value in entry.items() if key != "keep"}
        return others | {"use": "memory/recompute-operators", "save": save}


MAX_SCHEMES = 32
"""Schemes that lower a module one inside the other."""


class StageMesh(JobPart):
    """Ranks with their axes, and the schemes over them."""

    mesh: dict[str, Count]
    """Sizes of the axes by name, outermost (slowest links) first."""
    views: dict[Literal["experts"], Annotated[dict[str, Count], Field(min_length=1)]] = {}
    """Other axes over the ranks of a pipeline stage, for the experts: edp, ep, etp."""
    schemes: Annotated[tuple[SchemeEntry, ...], Field(max_length=MAX_SCHEMES)] = ()
    """Outermost first."""


class StagePlan(StageMesh):
    """The ranks of a pipeline stage in long form. Their numbers follow those of the stage before."""

    layers: LayerCount | tuple[LayerCount, ...] | None = None
    """Layers of the stage; with chunks, of all of them together or of each. Default: those of `LongPlan.partition`."""


class ReplicaPlan(JobPart):
    """Data-parallel replicas that are alike, in long form; see `Replicas`."""

    dp: Count = 1
    microbatches: Count | ClassOrder | None = None
    stages: tuple[StagePlan, ...] = ()

    @property
    def count(self) -> int | None:
        """Number of micro-batches that each of them runs; None: by speed."""
        return len(self.microbatches) if isinstance(self.microbatches, tuple) else self.microbatches


class LongPlan(StageMesh):
    """A plan in long form: axes of the mesh, and the schemes over them."""

    partition: str | tuple[int, ...] = "even"
    pad_heads: bool = False
    """Heads that the ranks do not divide are padded with dummy heads, which are computed and stored like the others
    (`simulator.models.model.Model.pad_heads`). Default: they are refused."""
    stages: tuple[StagePlan, ...] = ()
    """Pipeline stages with separate degrees; `mesh` has then the axis of the pipeline alone."""
    replicas: tuple[ReplicaPlan, ...] = ()
    """Kinds of data-parallel replicas that run different numbers of micro-batches, or have separate stages."""
    share: Literal["even", "by-speed"] = "even"
    """by-speed: replicas on every kind of node get as many micro-batches as make them finish together."""

    @property
    def has_stages(self) -> bool:
        """Whether stages have separate degrees."""
        return bool(self.stages) or any(replica.stages for replica in self.replicas)

    def with_schemes(self, change: Callable[[StageMesh], tuple[SchemeEntry, ...]]) -> LongPlan:
        """Returns the plan with other schemes, wherever it has some. change: returns the schemes of a mesh."""

        def change_mesh(stage: Any) -> Any:
            return stage.model_copy(update={"schemes": change(stage)})

        if not (self.stages or self.replicas):
            schemes = change(self)
            same = len(schemes) == len(self.schemes) and all(map(is_, schemes, self.schemes))
            return self if same else self.model_copy(update={"schemes": schemes})
        stages = tuple(map(change_mesh, self.stages))
        replicas = tuple(
            replica.model_copy(update={"stages": tuple(map(change_mesh, replica.stages))}) for replica in self.replicas
        )
        return change_mesh(self).model_copy(update={"stages": stages, "replicas": replicas})  # type: ignore[no-any-return]


PlainTokens = Annotated[float, Field(strict=True, gt=0, le=1e20, allow_inf_nan=False)]
TokensOfRun = Annotated[PlainTokens, BeforeValidator(read_tokens, json_schema_input_type=PlainTokens | str)]


class RunLength(JobPart):
    """Length, price and electricity of a training run, and what ``meshcast run`` simulates of it."""

    tokens: TokensOfRun | None = None
    """Tokens to train on; K, M, B and T are powers of 1,000. Default: unknown, and no days, energy or money are
    forecast."""
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
    """Number of simulated runs, each with other random numbers. Default: 32."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] | None = None
    """Of all their random numbers. Default: 0."""
    most_days: float | None = Field(default=None, strict=True, gt=0, le=1e9, allow_inf_nan=False)
    """Days after which a simulated run that has not reached its length is given up. Default: 3,650, or 100 times as
    many as it has without failures."""
    most_events: Annotated[int, Field(strict=True, gt=0, le=1_000_000_000)] | None = None
    """Events of the simulation after which it is given up. Default: 1,000,000."""
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
        """Returns tokens and price, and what is stated of electricity."""
        stated = self.model_dump(mode="json", exclude_none=True)
        return {"tokens": None, "price_per_gpu_hour": None, **stated}


def _list_word(words: object) -> object:
    """Lists a word by itself, such as all-linear."""
    return (words,) if isinstance(words, str) else words


class Train(JobPart):
    """Which parameters are trained: all, those of adapters only, or none."""

    mode: Literal["full", "lora", "qlora", "forward-only"] = "full"
    """lora: adapters alone. qlora: the same, over matrices of 4 bits. forward-only: a step runs forward passes alone,
    as for evaluation."""
    rank: Count | None = None
    """Rank of the adapters. Default: 16."""
    targets: Annotated[tuple[StrictStr, ...] | None, BeforeValidator(_list_word)] = None
    """Linear layers with an adapter: attn_qkv or its parts attn_q, attn_k, attn_v, attn_proj; attn_q_down, attn_q_up,
    attn_kv_down and attn_kv_up of latent attention; mixer_in and mixer_out of Mamba-2; mlp_up, mlp_down, shared_up,
    shared_down, expert_up, expert_down, router, shared_gate; also by the names of modules, which may mean several:
    q_proj, kv_a_proj_with_mqa, linear_fc1, all-linear. Default: all but router and shared_gate."""
    dropout: StrictBool | None = None
    """Whether the inputs of adapters have dropout. Default: no."""
    frozen_weights: StoredName | None = None
    """Format in which the matrices of linear layers under adapters are stored; embedding, output layer, norms and
    biases keep that of the computation. Default: nf4-double with qlora, otherwise that of the computation."""

    reference: StrictBool | Literal["model", "adapters-off"] | None = None
    """A frozen reference runs a forward pass over every micro-batch, as in DPO and KTO: a copy of the model, or the
    trained model without its adapters, which true chooses where there are some. Default: there is none."""

    @property
    def has_adapters(self) -> bool:
        """Whether adapters alone are trained."""
        return self.mode in ("lora", "qlora")


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
    """Number of steps played in turn."""


class Published(BaseModel):
    """A figure of a run and its source: the key ``published`` of a job."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    step_time_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tokens_per_s_per_gpu: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tflops_per_gpu: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Model FLOP/s per GPU [TFLOP/s]."""
    mfu: float | None = Field(default=None, gt=0, le=1)
    flops: Literal["palm", "causal"] = "palm"
    """Convention of model FLOPs: ``palm`` counts attention in full, ``causal`` the half that the mask leaves."""
    source: str
    """Paper and table, or address of a page."""

    @model_validator(mode="after")
    def _check_figures(self) -> Published:
        if len(self.figures) != 1:
            names = ", ".join(self.figures) or "none"
            raise ValueError(f"one figure of step_time_s, tokens_per_s_per_gpu, tflops_per_gpu, mfu; given: {names}")
        return self

    @property
    def figures(self) -> dict[str, float]:
        """The published figure by its name."""
        names = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def compare(self, forecast: dict[str, float]) -> dict[str, Any]:
        """Returns the comparison with the forecast, as the answer holds it.

        forecast: all forecast figures by name.
        ``error`` is always that of the step time, forecast / published - 1;
        the error of a published rate is converted to it.
        """
        ((name, value),) = self.figures.items()
        ratio = forecast[name] / value
        return {
            "figure": name,
            "published": value,
            "forecast": forecast[name],
            "error": ratio - 1 if name == "step_time_s" else 1 / ratio - 1,
            "source": self.source,
        }


def _check_mapping(plan: Any) -> Any:
    """Refuses a plan that is not a mapping."""
    if plan == "auto":
        rule = "leaves the plan to a search, which is not made here"
        raise ValueError(f"{rule}. Write meshcast search JOB --jobs-to best, and name a file of that folder")
    if not isinstance(plan, Mapping):
        long = ", ".join(LongPlan.model_fields)
        raise ValueError(f"must be a mapping of keys to values. Keys: {', '.join(ShortPlan.model_fields)}; or {long}")
    return plan


class JobFile(JobPart):
    """The keys of a job file."""

    id: StrictStr | StrictInt | None = None
    model: Any
    cluster: Any
    framework: Annotated[FrameworkChoice, short_for("name", str | FrameworkChoice)] = FrameworkChoice()
    batch: Batch = Batch()
    precision: Annotated[Precision, short_for("compute", Literal[Format, QuantisedRecipe] | Precision)] = Precision()
    optimizer: Annotated[OptimizerChoice, short_for("name", OptimizerName | OptimizerChoice)] = OptimizerChoice()
    train: Train = Train()
    plan: Annotated[dict[str, Any], BeforeValidator(_check_mapping)] = {}
    run: RunLength = RunLength()
    noise: Noise | None = None
    published: Published | None = None
    """A published figure of this run, to compare the forecast with."""


class JobOrigin(NamedTuple):
    """Where a job was read.

    where: path of the job file.
    text: its text.
    places: of a launch file, the setting behind each key of the job.
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
    taken: tuple[RecipeValue, ...] = ()
    """What the job leaves open and takes from the recipes of its program."""
    without_flash: GPU | None = None
    """A GPU that is too old for the fused attention of the framework, whose attention is therefore unfused."""
    batch: Batch
    drawn: tuple[tuple[Batch, LongPlan], ...] = ()
    """Of several batches that are drawn (`Samples.batches`), each with its plan: batch and plan are those of one of
    them. Empty: there is one batch."""
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
        """Returns whether both jobs mean the same, in whatever form they were written."""
        fields = type(self).model_fields.keys() - {"as_written", "folder", "taken"}
        return isinstance(other, Job) and all(getattr(self, name) == getattr(other, name) for name in fields)

    @property
    def adapters(self) -> Adapters | None:
        """The adapters, if they alone are trained."""
        if self.train.rank is None or self.train.targets is None:
            return None
        kernels = self.framework.adapters
        if self.framework.compile:
            kernels = kernels.model_copy(update={"eager": False})
        stored = self.train.frozen_weights or ""
        return Adapters(self.train.rank, self.train.targets, bool(self.train.dropout), kernels, stored)

    @property
    def means_program(self) -> bool:
        """Whether the job names its framework, and means the program of this name, not another program for which
        the profile stands."""
        framework = self.as_written["framework"]
        return "name" in framework and framework.get("rules", True)

    @property
    def forward_only(self) -> bool:
        """Whether a step runs forward passes alone."""
        return self.train.mode == "forward-only"

    def _framework_choice(self) -> dict[str, Any]:
        """Returns the traits of the framework that the job states or takes from recipes, and what else it says of
        it."""
        written = self.as_written["framework"]
        taken = nest_traits((key, value) for key, value, _ in self.taken if not key.startswith("plan."))
        switches = {"rules": written.get("rules", True), "recipe": written.get("recipe", True) and not taken}
        off = {key: False for key, is_on in switches.items() if not is_on}
        return {"set": merge_fields(taken, written.get("set", {})), **off}

    def _optimizer_choice(self) -> str | dict[str, object]:
        """Returns the optimizer, with what the job says of its update of matrices."""
        written = self.as_written.get("optimizer", {})
        return dict(written) if isinstance(written, Mapping) and len(written) > 1 else self.framework.update.optimizer

    def to_dict(self) -> dict[str, Any]:
        """Returns the job in long form, every default filled."""
        return {
            "model": self.as_written["model"],
            "cluster": self.as_written["cluster"],
            "framework": {"name": self.framework.name, "release": self.release, **self._framework_choice()},
            "batch": self.as_written["batch"] if self.drawn else self.batch.to_dict(),
            "precision": self.precision.model_dump(),
            "optimizer": self._optimizer_choice(),
            **({"train": self.train.model_dump(mode="json", exclude_none=True)} if self.train != Train() else {}),
            "plan": plan_to_dict(self.plan.model_copy(update={"replicas": ()}) if self.drawn else self.plan),
            "run": self.run.to_dict(),
            **({"noise": self.noise.model_dump()} if self.noise else {}),
            **({"published": self.published.model_dump(exclude_none=True)} if self.published else {}),
        }


def plan_to_dict(plan: LongPlan | StagePlan) -> dict[str, Any]:
    """Returns a plan or one of its stages as a mapping, without what it does not use."""
    optional = {key for key in ("views", "pad_heads", "stages", "replicas") if not getattr(plan, key, True)}
    optional |= {key for key, idle in (("share", "even"), ("layers", None)) if getattr(plan, key, idle) == idle}
    fields = plan.model_dump(mode="json", exclude={"schemes", *optional})
    fields["schemes"] = [
        {"use": entry.use, **({"over": _shorten(entry.over)} if entry.over else {}), **(entry.model_extra or {})}
        for entry in plan.schemes
    ]
    if isinstance(plan, LongPlan) and plan.stages:
        fields["stages"] = [plan_to_dict(stage) for stage in plan.stages]
    if isinstance(plan, LongPlan) and plan.replicas:
        fields["replicas"] = [
            replica.model_dump(mode="json", exclude={"stages"}, exclude_none=True)
            | ({"stages": [plan_to_dict(stage) for stage in replica.stages]} if replica.stages else {})
            for replica in plan.replicas
        ]
    return fields


def _shorten(axes: tuple[str, ...]) -> str | list[str]:
    return axes[0] if len(axes) == 1 else list(axes)
