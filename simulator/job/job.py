"""The job file: what to forecast, in short or long form, read and checked.

`load_job` turns a YAML or JSON file (or a mapping) into a `Job`; ``simulator.plan.plan`` turns its plan into a mesh
and schemes. The long form, with every default filled, is the ``job`` of the answer.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, StrictStr

from hardware import Cluster, load_cluster
from hardware.errors import MeshcastError, PlanError, nearest
from hardware.load import line_of, read_yaml, validated
from simulator.ir.registry import find_scheme, scheme_names
from simulator.job.framework import Format, Framework, Quantised, load_framework
from simulator.job.published import Published
from simulator.models.adapters import TARGETS, Adapters, Target
from simulator.models.load import load_model
from simulator.models.model import Model

Count = Annotated[int, Field(strict=True, gt=0, le=1_000_000_000)]
"""A degree, a batch, a number of tokens. The ceiling is far above any job and catches slipped digits."""


DEFAULT_RANK = 16
"""Of adapters whose rank is not told."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _short_for(key: str, told: Any) -> BeforeValidator:
    """A single word stands for a mapping with that one key. told: the types of both forms."""
    return BeforeValidator(lambda given: {key: given} if isinstance(given, str) else given, json_schema_input_type=told)


class Batch(Part):
    """Sequences of one step: of the whole job, of one replica and pass; and their tokens."""

    total: Count | None = Field(default=None, alias="global")
    """Default: one micro-batch a replica without a pipeline, four a stage with one."""
    micro: Count = 1
    sequence: Count | None = None
    """Default: the model's own."""


class Precision(Part):
    """Number formats; what is not given is the framework's habit."""

    compute: Literal[Format, Quantised] | None = None
    """Of the linear layers' products; below 16 bits everything else computes in bf16."""
    gradients: Format | None = None
    main_weights: Format | None = None
    moments: Format | None = None


class FrameworkChoice(Part):
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


class ShortPlan(Part):
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


class LongPlan(Part):
    mesh: dict[str, Count]
    """Axis names to sizes, outermost (slowest links) first."""
    views: dict[Literal["experts"], dict[str, Count]] = {}
    """A second reading of the ranks of one pipeline stage, for the experts: edp, ep, etp."""
    schemes: tuple[SchemeEntry, ...] = ()
    """Outermost first."""
    partition: str | tuple[int, ...] = "even"


class RunLength(Part):
    tokens: float | None = Field(default=None, strict=True, gt=0, le=1e20, allow_inf_nan=False)
    price_per_gpu_hour: float | None = Field(default=None, strict=True, ge=0, le=1e9, allow_inf_nan=False)


class Train(Part):
    """What is trained: all, or adapters beside frozen weights."""

    mode: Literal["full", "lora"] = "full"
    rank: Count | None = None
    """Of the adapters. Default: 16."""
    targets: tuple[Target, ...] | None = None
    """Linears that get an adapter. Default: all of them."""


class Noise(Part):
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


class JobFile(Part):
    """The keys of a job file."""

    id: StrictStr | StrictInt | None = None
    model: Any
    cluster: Any
    framework: Annotated[FrameworkChoice, _short_for("name", str | FrameworkChoice)] = FrameworkChoice()
    batch: Batch = Batch()
    precision: Annotated[Precision, _short_for("compute", Literal[Format, Quantised] | Precision)] = Precision()
    optimizer: Literal["adam"] = "adam"
    train: Train = Train()
    plan: Annotated[dict[str, Any], BeforeValidator(_has_keys)] = {}
    run: RunLength = RunLength()
    noise: Noise | None = None
    published: Published | None = None
    """What somebody measured of this run, to stand beside the forecast."""


class Job(Part):
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
    named: dict[str, Any]
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
            "model": self.named["model"],
            "cluster": self.named["cluster"],
            "framework": {"name": self.framework.name, "release": self.release, "set": self.named["set"]},
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


def load_job(
    source: str | Path | Mapping[str, Any], changes: Iterable[str] = (), base: str | Path | None = None
) -> Job:
    """The job in a file (YAML or JSON) or a mapping, with `changes` (``plan.tp=4``) made first.

    base: the folder that paths in it start from; the file's own, or the current one, if not given.
    Raises PlanError, ModelError or CatalogError for the first thing that is wrong.
    """
    folder, text, where = Path("."), "", "job"
    if isinstance(source, Mapping):
        data: Any = copy.deepcopy(dict(source))
    elif not isinstance(source, (str, Path)):
        raise PlanError("job", "a job is the path of a file, or a mapping", "Name a YAML or JSON file", source)
    else:
        path = Path(source)
        data, text, where = read_yaml(path, str(source), PlanError)
        folder = path.parent
    if not isinstance(data, dict):
        raise PlanError(where, "a job is a mapping of keys to values", "Start with `model:` and `cluster:`", data)
    changed = list(changes)
    for change in changed:
        _set(data, change)
    file = validated(JobFile, data, f"{where} " if changed else where, PlanError, text="" if changed else text)

    with located(where, text):
        return _job(file, folder if base is None else Path(base), (where, text))


def _job(file: JobFile, base: Path, origin: tuple[str, str]) -> Job:
    """The job of a checked file: its model, cluster and framework found, its plan in long form."""
    choice = file.framework
    framework = load_framework(choice.name, choice.set)
    cluster = load_cluster(file.cluster, "cluster", base)
    model = load_model(file.model, "model", base)
    precision = _precision(file, framework)
    quantised = precision.compute in get_args(Quantised)
    formats = {
        "weights": "bf16" if quantised else precision.compute,
        "quantised": precision.compute if quantised else "",
        "gradients": precision.gradients,
        "main_weights": precision.main_weights,
        "moments": precision.moments,
    }
    framework = load_framework(choice.name, choice.set | formats)
    plan = _from(base, _long(file.plan, cluster.gpus, model))
    plan = _overlapped(plan) if framework.overlap.tp else plan
    named = {"model": file.model, "cluster": file.cluster, "set": choice.set}
    return Job(
        id=file.id,
        model=model,
        cluster=cluster,
        framework=framework,
        release=choice.release,
        batch=_batch(file.batch, model, plan),
        precision=precision,
        train=_train(file.train, model),
        plan=plan,
        run=file.run,
        noise=file.noise,
        published=file.published,
        named=named,
        origin=origin,
    )


def _overlapped(plan: LongPlan) -> LongPlan:
    """The plan with a scheme that overlaps its tensor parallelism, where it has some and says nothing of that."""
    uses = [entry.use for entry in plan.schemes]
    tensor = [i for i, use in enumerate(uses) if use.startswith("tensor/") and use in scheme_names()]
    if not tensor or any(find_scheme(uses[i]).most_axes == 0 for i in tensor):
        return plan
    schemes = [*plan.schemes]
    schemes.insert(tensor[0], SchemeEntry(use="tensor/async-tp"))
    return plan.model_copy(update={"schemes": tuple(schemes)})


def _from(base: Path, plan: LongPlan) -> LongPlan:
    """The plan with the files of its schemes found from the job's folder."""
    schemes = [entry.model_copy(update=_found(base, entry.model_extra or {})) for entry in plan.schemes]
    return plan.model_copy(update={"schemes": tuple(schemes)})


def _found(base: Path, told: Mapping[str, Any]) -> dict[str, Any]:
    """Of a scheme's options those that name a file, with its path from the current folder."""
    found = {key: str(base / told[key]) for key in ("path", "counts") if isinstance(told.get(key), str)}
    inner = {key: _found(base, value) for key, value in told.items() if isinstance(value, Mapping)}
    return found | {key: {**told[key], **value} for key, value in inner.items() if value}


@contextmanager
def located(where: str, text: str) -> Iterator[None]:
    """Puts file and line in front of the place of an error that names a field of the job."""
    try:
        yield
    except MeshcastError as error:
        field = error.where.split(" ")[0]
        if not text or field.partition(".")[0] not in JobFile.model_fields:
            raise
        place = [int(key) if key.isdigit() else key for key in re.findall(r"[^.\[\]]+", field)]
        raise error.at(f"{where}:{line_of(text, tuple(place))}") from None


def _set(data: dict[str, Any], change: str) -> None:
    """Makes one change of the form ``plan.tp=4``; the value is read as YAML."""
    field, equals, value = (word.strip() for word in change.partition("="))
    if not equals or not all(field.split(".")):
        raise PlanError("--set", "a change is written field=value", "For example --set plan.tp=4", change)
    put(data, field, read_yaml(value, f"--set {field}", PlanError).data, f"--set {field}")


def put(data: dict[str, Any], field: str, value: Any, where: str) -> None:
    """Sets one field (``plan.tp``) of a job that is still plain data. where: what an error calls the change."""
    *parents, last = field.split(".")
    at: Any = data
    for i, key in enumerate(parents):
        at = at.setdefault(key, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict):
            raise PlanError(where, f"{'.'.join(parents[: i + 1])} holds no fields", "Set it as a whole", value)
    at[last] = value


def _precision(file: JobFile, framework: Framework) -> Precision:
    given = file.precision
    # Whoever computes in fp32 loses nothing when gradients are added up.
    gradients = "fp32" if given.compute == "fp32" else framework.gradients
    return Precision(
        compute=given.compute or framework.quantised or framework.weights,
        gradients=given.gradients or gradients,
        main_weights=given.main_weights or framework.main_weights,
        moments=given.moments or framework.moments,
    )


def _train(train: Train, model: Model) -> Train:
    """Raises PlanError for adapters where there are none, or at what the model does not have."""
    if train.mode == "full":
        for key in ("rank", "targets"):
            if (told := getattr(train, key)) is not None:
                raise PlanError(f"train.{key}", "only adapters have it", "Say mode: lora, or leave it out", told)
        return train
    targets = TARGETS if train.targets is None else tuple(dict.fromkeys(train.targets))
    if not targets:
        raise PlanError("train.targets", "nothing would be trained", f"Name some of {', '.join(TARGETS)}", [])
    Adapters(rank := train.rank or DEFAULT_RANK, targets).check(model)
    return Train(mode="lora", rank=rank, targets=targets)


def _batch(batch: Batch, model: Model, plan: LongPlan) -> Batch:
    stages, replicas = _degree(plan, "pipeline"), _degree(plan, "data")
    total = batch.total or replicas * batch.micro * (4 * stages if stages > 1 else 1)
    return batch.model_copy(update={"total": total, "sequence": batch.sequence or model.seq})


def _degree(plan: LongPlan, family: str) -> int:
    """The product of the axes that a family claims."""
    claims = (
        find_scheme(entry.use).all_axes(entry.over, entry.model_extra or {})
        for entry in plan.schemes
        if entry.use.startswith(f"{family}/") and entry.use in scheme_names()
    )
    axes = [axis for claim in claims for axis in claim]
    return math.prod(plan.mesh.get(axis, 1) for axis in axes)


def _long(plan: Mapping[str, Any], gpus: int, model: Model) -> LongPlan:
    """The long form of a plan, with the default scheme of every axis of a short one."""
    if "mesh" in plan or "schemes" in plan:
        return validated(LongPlan, dict(plan), "plan", PlanError)
    short = validated(ShortPlan, dict(plan), "plan", PlanError)
    model_ranks = short.tp * short.pp * short.cp
    if short.dp is None and gpus % model_ranks:
        raise _no_fit({"tp": short.tp, "pp": short.pp, **({"cp": short.cp} if short.cp > 1 else {})}, gpus)
    dp = short.dp or gpus // model_ranks
    schedule = short.schedule or ("interleaved-1f1b" if (short.chunks or 1) > 1 else "1f1b")
    try:
        kind = find_scheme(f"pipeline/{schedule}")
    except PlanError:
        known = [use.removeprefix("pipeline/") for use in scheme_names() if use.startswith("pipeline/")]
        remedy = nearest(schedule.rpartition("/")[2], known)
        raise PlanError("plan.schedule", "no such schedule", remedy, schedule) from None
    chunks = short.chunks or kind.Options.model_fields["chunks"].default
    data = "data/fsdp" if short.fsdp else f"data/zero-{short.zero}" if short.zero else "data/ddp"
    schemes: list[dict[str, Any]] = [
        {"use": f"pipeline/{schedule}", "over": "pp", "chunks": chunks},
        {"use": data, "over": "dp"},
        *([{"use": "sequence/all-gather", "over": "cp"}] if short.cp > 1 else []),
        {"use": "tensor/megatron-sp" if short.sequence_parallel else "tensor/megatron", "over": "tp"},
    ]
    views = _views(short, dp * short.cp * short.tp, model.moe.experts if model.moe else 1)
    if views:
        schemes.append({"use": "expert/all-to-all", "over": ["ep", "etp"] if views["experts"]["etp"] > 1 else ["ep"]})
    if short.recompute == "full":
        schemes.append({"use": "memory/recompute-full"})
    elif short.recompute == "selective":
        schemes.append({"use": "memory/recompute-selective", "modules": ["core_attn"]})
    mesh = {"pp": short.pp, "dp": dp, **({"cp": short.cp} if short.cp > 1 else {}), "tp": short.tp}
    long = {"mesh": mesh, "views": views, "schemes": schemes, "partition": short.partition}
    return validated(LongPlan, long, "plan", PlanError)


def _no_fit(degrees: dict[str, int], gpus: int) -> PlanError:
    """Degrees whose product does not divide the GPUs: the one that is at fault, and what would work in its place."""
    product = math.prod(degrees.values())
    culprit = next((name for name, n in degrees.items() if gpus % (product // n) == 0 and n > 1), "tp")
    others = product // degrees[culprit]
    fits = [n for n in range(1, 2 * degrees[culprit]) if gpus % (n * others) == 0]
    near = min(fits, key=lambda n: abs(n - degrees[culprit]), default=None)
    rule = f"{' x '.join(degrees)} = {' x '.join(map(str, degrees.values()))} = {product} must divide the {gpus} GPUs"
    kept = " and ".join(f"{name} = {n}" for name, n in degrees.items() if name != culprit)
    remedy = f"With {kept}, {culprit} = {near} would work" if near else "Choose degrees that divide it"
    return PlanError(f"plan.{culprit}", rule, remedy, degrees[culprit])


def _views(short: ShortPlan, ranks: int, experts: int) -> dict[str, dict[str, int]]:
    """How the ranks of one pipeline stage are read for the experts, where that is not as for everything else."""
    if short.ep == 1 and short.etp is None:
        return {}
    etp = short.etp or 1
    if ranks % (short.ep * etp):
        name, given = ("ep", short.ep) if ranks % short.ep else ("etp", etp)
        rest = etp if name == "ep" else short.ep
        fits = [n for n in range(1, ranks + 1) if ranks % (n * rest) == 0 and (name == "etp" or experts % n == 0)]
        near = min(fits, key=lambda n: abs(n - given), default=None)
        rule = f"ep x etp = {short.ep} x {etp} must divide dp x cp x tp = {ranks}"
        raise PlanError(f"plan.{name}", rule, f"{name} = {near} would work" if near else "Lower the other one", given)
    return {"experts": {"edp": ranks // (short.ep * etp), "ep": short.ep, "etp": etp}}
