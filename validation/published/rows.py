"""Published runs as data: a JSON object on each line, with the configuration in ``spec`` and figures in ``measured``.

Null or a missing key means that the source does not state it, never "off". Other keys are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field, model_validator
from meshcast.validation.measurements.jsonl import read_lines

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

STEP_SECONDS = 1e-6, 1e7
"""Shortest and longest measured step that is read [s]: a microsecond, 115 days."""

PEAK_GIB = 1e-6, 1e6
"""Smallest and largest measured peak memory of a GPU that is read [GiB]: a KiB, a PiB."""


class SpecModel(BaseModel):
    """Base of the parts of a spec: immutable, exact types, unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Network(SpecModel):
    kind: Literal["infiniband", "roce", "efa", "omnipath", "ethernet", "slingshot", "none"] | None = None
    gbps_per_gpu: Annotated[float, Field(ge=1e-6, le=100_000)] | None = None
    stated: bool | None = None


class RunModel(SpecModel):
    """The model; `moe`, `mla` and `ssm` are passed to the job unchanged."""

    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    ffn: Count | None = None
    gated: bool | None = None
    vocab: Count | None = None
    seq: Count | None = None
    tied: bool | None = None
    norm: Literal["layernorm", "rmsnorm", "layernorm1p"] | None = None
    positions: Literal["learned", "rope", "alibi", "none"] | None = None
    attention: Literal["flash", "unfused"] | None = None
    qk_layernorm: bool | None = None
    window: Count | None = None
    mla: dict[str, Any] | None = None
    moe: dict[str, Any] | None = None
    ssm: dict[str, Any] | None = None
    mtp: Annotated[int, Field(ge=0, le=1000)] | None = None


class Degrees(SpecModel):
    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    etp: Count | None = None
    vpp: Count | None = None


class RunBatch(SpecModel):
    micro: Count | None = None
    total: Count | None = Field(default=None, alias="global")
    seq: Count | None = None


class Recompute(SpecModel):
    kind: Literal["none", "selective", "full"] | None = None
    layers: Count | None = None
    modules: list[str] | None = None


class RunOffload(SpecModel):
    kind: Literal["none", "activations", "optimizer", "params"] | None = None
    layers: Count | None = None


class RunOverlap(SpecModel):
    dp: bool | None = None
    tp: bool | None = None
    pp: bool | None = None
    ep: bool | None = None


class RunAdapters(SpecModel):
    rank: Count | None = None
    targets: list[str] | None = None


class Spec(SpecModel):
    """Configuration of a run."""

    kind: Literal["dense", "moe", "hybrid-ssm", "lora", "sft-packed", "other"] = Field(alias="class")
    stack: str
    stack_version: str | None = None
    gpu: str | None = None
    gpus: Count | None = None
    gpus_per_node: Count | None = None
    scale_up_domain: Count | None = None
    inter: Network = Network()
    precision: (
        Literal[
            "bf16", "fp16", "fp8", "fp8-delayed", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4"
        ]
        | None
    ) = None
    grad_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    main_weights: Literal["fp32", "bf16", "fp16"] | None = None
    optimizer: Literal["adam", "adamw", "muon", "lamb"] | None = None
    compile: bool | None = None
    cuda_graphs: bool | None = None
    model: RunModel = RunModel()
    lora: RunAdapters | None = None
    mesh: Degrees = Degrees()
    batch: RunBatch = RunBatch()
    schedule: str | None = None
    pipeline_split: Literal["even", "ends-as-layers", "uneven"] | None = None
    sequence_parallel: bool | None = None
    sharding: Literal["none", "zero1", "zero2", "zero3", "fsdp-full", "fsdp-hybrid", "fsdp-grad-op"] | None = None
    shard_group: Count | None = None
    recompute: Recompute = Recompute()
    offload: RunOffload = RunOffload()
    overlap: RunOverlap = RunOverlap()
    memory_kind: Literal["torch-allocated", "torch-reserved", "nvidia-smi", "unknown"] | None = None
    filled: list[str] = []

    def width(self, axis: str) -> int:
        """Returns the degree along an axis; 1 if unknown."""
        return getattr(self.mesh, axis) or 1

    @property
    def domain(self) -> int | None:
        """GPUs of the scale-up domain if known, otherwise of a node."""
        return self.scale_up_domain or self.gpus_per_node


class PublishedFigures(SpecModel):
    """Measured figures; those after `peak_memory_gib` are kept for answers, and not compared. Other magnitudes than of
    `STEP_SECONDS` are mistakes of units."""

    step_time_s: Annotated[float, Field(ge=STEP_SECONDS[0], le=STEP_SECONDS[1])] | None = None
    tokens_per_s_per_gpu: Positive | None = None
    peak_memory_gib: Annotated[float, Field(ge=PEAK_GIB[0], le=PEAK_GIB[1])] | None = None
    samples_per_s: Positive | None = None
    tflops_per_gpu: Positive | None = None
    mfu: Positive | None = None
    hfu: Positive | None = None
    flops_convention: str | None = None


class PublishedPlan(BaseModel):
    """The plan in the words of its source; what `spec` has no key for is read from it.

    other: settings of its launch script or recipe.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    other: str | None = None


class PublishedHardware(BaseModel):
    """The hardware in the words of its source.

    inter: the network between nodes, and sometimes the name of the cluster.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    inter: str | None = None


class PublishedRun(BaseModel):
    """One published run.

    model: in the words of its source; only its `name` is read.
    cited: paper or repository, and the place in it.
    trust: how certain its figures are.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    id: str
    spec: Spec
    model: Any = None
    cited: Any = Field(default=None, alias="source")
    trust: Any = None
    hardware: PublishedHardware = PublishedHardware()
    plan: PublishedPlan = PublishedPlan()
    measured: PublishedFigures = PublishedFigures()

    @model_validator(mode="after")
    def _check_throughput(self) -> Self:
        shortest, longest = STEP_SECONDS
        if self.step_time is not None and not shortest <= self.step_time <= longest:
            rate = f"measured.tokens_per_s_per_gpu of {self.measured.tokens_per_s_per_gpu:g}"
            rule = f"{rate} makes a step of {self.step_time:g} s, and a step takes {shortest:g} s to {longest:g} s"
            raise ValueError(f"{rule}. Correct it, or gpus, batch.global or batch.seq in spec")
        return self

    @property
    def token_dispatcher(self) -> str:
        """The backend of Megatron-Core's flex token dispatcher (deepep, hybridep); empty if the source names none."""
        backend = re.search(r"moe_flex_dispatcher_backend=(\w+)", self.plan.other or "")
        return backend[1] if backend else ""

    @property
    def kernel_plugin(self) -> str:
        """The set of kernels that the table of fms-acceleration names as ``framework_config``; empty elsewhere."""
        named = re.search(r"framework_config (\S+)", self.citation)
        return named[1] if named else ""

    @property
    def fuses_loss(self) -> bool:
        """Whether the source says that the cross-entropy is fused."""
        return "cross-entropy fusion" in (self.plan.other or "")

    @property
    def is_of_torch_1(self) -> bool:
        """Whether LLM Foundry ran on PyTorch 1.13, the default image of its submit_benchmarks.py while mixed precision
        PURE was the default, too (mosaicml/llm-foundry @12a63191)."""
        return self.spec.stack == "llm-foundry" and "mixed_precision=PURE" in (self.plan.other or "")

    @property
    def model_name(self) -> str:
        """Name of the model without what a source adds in parentheses (a depth proxy); its shape if it has no name."""
        name = self.model.get("name") if isinstance(self.model, dict) else None
        if isinstance(name, str) and name:
            return re.sub(r"\s*\(.*", "", name)
        shape = self.spec.model
        experts = f", {shape.moe.get('experts')} experts" if shape.moe else ""
        return f"hidden {shape.hidden}, feed-forward {shape.ffn}{experts}"

    @property
    def citation(self) -> str:
        """Paper or repository, and the place in it; empty if the run does not say."""
        return self.cited if isinstance(self.cited, str) else ""

    @property
    def source(self) -> str:
        """Source of the run: its id up to the first dash."""
        return "vtrain-multi" if self.id.startswith("vtrain-multi-") else self.id.partition("-")[0]

    @property
    def step_time(self) -> float | None:
        """Measured seconds per step, from the throughput if no time is published; None if neither is known."""
        measured, spec = self.measured, self.spec
        if measured.step_time_s is not None or measured.tokens_per_s_per_gpu is None:
            return measured.step_time_s
        if not (spec.gpus and spec.batch.total and spec.batch.seq):
            return None
        return spec.batch.total * spec.batch.seq / (spec.gpus * measured.tokens_per_s_per_gpu)


class UnreadableLine(BaseModel):
    """A line that cannot be read as a run, and the reason."""

    model_config = ConfigDict(frozen=True)

    id: str | None = None
    reason: str


def read(path: Path) -> list[PublishedRun | UnreadableLine]:
    """Reads the runs of a JSONL file, in order; of two with the same id only the first.

    Raises PlanError for a file that cannot be read.
    """
    return read_files([path])


def read_files(paths: Sequence[Path]) -> list[PublishedRun | UnreadableLine]:
    """Reads the runs of JSONL files, each as by `read`. Raises PlanError for an id that two files have: neither is the
    first."""
    rows: list[PublishedRun | UnreadableLine] = []
    places: dict[str, str] = {}
    for path in paths:
        wheres: dict[str, str] = {}
        for where, line in read_lines(path):
            run = _parse_run(where, line)
            if isinstance(run, PublishedRun) and run.id in places:
                rule = f"the run of {places[run.id]} has the same id"
                raise PlanError(f"{where} id", rule, "Name each file once, and keep one of the two runs", run.id)
            if isinstance(run, PublishedRun) and wheres.setdefault(run.id, where) != where:
                reason = f"{where} id is {run.id!r}: {wheres[run.id]} has this id. Remove one of the two, or rename it"
                run = UnreadableLine(id=run.id, reason=reason)
            rows.append(run)
        places |= wheres
    return rows


def _parse_run(where: str, row: dict[str, Any] | str) -> PublishedRun | UnreadableLine:
    if isinstance(row, str):
        return UnreadableLine(reason=row)
    try:
        return validate_data(PublishedRun, row, f"{where} ", PlanError)
    except PlanError as error:
        name = row.get("id")
        return UnreadableLine(id=name if isinstance(name, str) else None, reason=str(error))


def read_shipped() -> list[PublishedRun]:
    """Returns the runs that ship with meshcast: tables of three papers."""
    folder = resources.files("meshcast.validation.published").joinpath("shipped")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return [row for file in files for row in _expand_table(file.name, read_yaml(file).data)]


def _expand_table(name: str, table: Mapping[str, Any]) -> list[PublishedRun]:
    """Reads the runs of a shipped file, whose ``common`` part of the spec is shared by all its rows."""
    rows = [
        {**row, "spec": _merge(table["common"], row["spec"]), "source": f"{table['source']}; {row['where']}"}
        for row in table["rows"]
    ]
    return [validate_data(PublishedRun, row, f"{name} {row['id']}", PlanError) for row in rows]


def _merge(base: Mapping[str, Any], specific: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings recursively; `specific` wins."""
    both = {key: _merge(base[key], value) for key, value in specific.items() if isinstance(value, dict) and key in base}
    return {**base, **specific, **both}
