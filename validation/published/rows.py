"""Published runs as data: one JSON object a line, whose ``spec`` describes the run in fixed words.

Null, or a key that is missing, means that the source does not say; it never means "off". ``measured`` holds the figures
of the source; whatever else a row carries is prose for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hardware.errors import PlanError
from hardware.load import read_yaml, validated
from validation.measurements.jsonl import read_lines

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Network(Part):
    kind: Literal["infiniband", "roce", "efa", "omnipath", "ethernet", "slingshot", "none"] | None = None
    gbps_per_gpu: Positive | None = None
    stated: bool | None = None


class Shape(Part):
    """The model; experts, latent attention and state-space layers are handed on as they stand."""

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


class Degrees(Part):
    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    etp: Count | None = None
    vpp: Count | None = None


class Batch(Part):
    micro: Count | None = None
    total: Count | None = Field(default=None, alias="global")
    seq: Count | None = None


class Recompute(Part):
    kind: Literal["none", "selective", "full"] | None = None
    layers: Count | None = None
    modules: list[str] | None = None


class Offload(Part):
    kind: Literal["none", "activations", "optimizer", "params"] | None = None
    layers: Count | None = None


class Overlap(Part):
    dp: bool | None = None
    tp: bool | None = None
    pp: bool | None = None
    ep: bool | None = None


class Adapters(Part):
    rank: Count | None = None
    targets: list[str] | None = None


class Spec(Part):
    """A run in fixed words."""

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
    model: Shape = Shape()
    lora: Adapters | None = None
    mesh: Degrees = Degrees()
    batch: Batch = Batch()
    schedule: str | None = None
    pipeline_split: Literal["even", "ends-as-layers", "uneven"] | None = None
    sequence_parallel: bool | None = None
    sharding: Literal["none", "zero1", "zero2", "zero3", "fsdp-full", "fsdp-hybrid", "fsdp-grad-op"] | None = None
    shard_group: Count | None = None
    recompute: Recompute = Recompute()
    offload: Offload = Offload()
    overlap: Overlap = Overlap()
    memory_kind: Literal["torch-allocated", "torch-reserved", "nvidia-smi", "unknown"] | None = None
    filled: list[str] = []

    def width(self, axis: str) -> int:
        """Ranks along one axis; 1 where that is not known."""
        return getattr(self.mesh, axis) or 1

    @property
    def domain(self) -> int | None:
        """GPUs joined at full speed, where known: those of a node if nobody says otherwise."""
        return self.scale_up_domain or self.gpus_per_node


class Measured(BaseModel):
    """What was measured; figures beyond these are carried along."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    step_time_s: Positive | None = None
    tokens_per_s_per_gpu: Positive | None = None
    peak_memory_gib: Positive | None = None


class Row(BaseModel):
    """One published run."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    id: str
    spec: Spec
    measured: Measured = Measured()

    @property
    def source(self) -> str:
        """Where it was published: its id up to the first dash."""
        return "vtrain-multi" if self.id.startswith("vtrain-multi-") else self.id.partition("-")[0]

    @property
    def step_time(self) -> float | None:
        """Measured seconds of a step; from the throughput where no time is printed."""
        told, spec = self.measured, self.spec
        if told.step_time_s is not None or told.tokens_per_s_per_gpu is None:
            return told.step_time_s
        if not (spec.gpus and spec.batch.total and spec.batch.seq):
            return None
        return spec.batch.total * spec.batch.seq / (spec.gpus * told.tokens_per_s_per_gpu)


class Unread(BaseModel):
    """A line that describes no run, and why."""

    model_config = ConfigDict(frozen=True)

    id: str | None = None
    reason: str


def read(path: Path) -> list[Row | Unread]:
    """The runs of a JSONL file, in its order.

    Raises PlanError for a file that cannot be read.
    """
    return [_row(where, found) for where, found in read_lines(path)]


def _row(where: str, found: dict[str, Any] | str) -> Row | Unread:
    if isinstance(found, str):
        return Unread(reason=found)
    try:
        return validated(Row, found, f"{where} ", PlanError)
    except PlanError as error:
        name = found.get("id")
        return Unread(id=name if isinstance(name, str) else None, reason=str(error))


def shipped() -> list[Row]:
    """The runs that ship with meshcast: classic tables, each row under its paper's number."""
    files = sorted(resources.files("validation.published").joinpath("shipped").iterdir(), key=lambda file: file.name)
    return [row for file in files if file.name.endswith(".yaml") for row in _table(file.name, read_yaml(file).data)]


def _table(name: str, table: Mapping[str, Any]) -> list[Row]:
    """The rows of one compact file: what all have in common is written once, under ``common``."""
    made = [{**row, "spec": _over(table["common"], row["spec"])} for row in table["rows"]]
    return [validated(Row, row, f"{name} {row['id']}", PlanError) for row in made]


def _over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _over(base[key], value) for key, value in own.items() if isinstance(value, dict) and key in base}
    return {**base, **own, **both}
