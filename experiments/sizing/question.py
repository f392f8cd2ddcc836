"""A question of size: what is trained, by when, for how much, on which kinds of nodes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshcast.experiments.search.space.fields import has_open_fields
from meshcast.experiments.sizing.batches import BatchLimits, limit_by_law, read_limits
from meshcast.experiments.sizing.kinds import SizedNode, list_kinds
from meshcast.experiments.sizing.options import SizeOptions
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import read_yaml
from meshcast.hardware.records import dataclass
from meshcast.simulator.job.job import Job, JobOrigin
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job, read_job
from meshcast.simulator.models.load import find_model
from meshcast.simulator.models.model import Model

SEQUENCE = 8192
"""Tokens of a sequence where a model alone is stated that takes so many: those of Llama 3 (arXiv 2407.21783, 3.4.1)."""

MICRO = [1, 2, 4]
"""Sequences of a micro-batch that are tried where the job does not state them."""

PLAN = Path(__file__).with_name("open_plan.yaml")
"""The plan that is searched where a job states none."""


@dataclass(frozen=True)
class SizeQuestion:
    """What is asked.

    job: as plain data, without a cluster and a size of the batch.
    model: its model.
    base: folder of its relative paths.
    origin: its file, for errors.
    kinds: of nodes, with their prices.
    tokens: of the training.
    days, budget: limits; None: not asked.
    limits: of the batch.
    most_gpus: of the largest cluster.
    is_open: whether the plan is searched at every size.
    assumed: a sentence each.
    """

    job: Fields
    model: Model
    base: Path
    origin: JobOrigin
    kinds: tuple[SizedNode, ...]
    tokens: float
    days: float | None
    budget: float | None
    limits: BatchLimits
    most_gpus: int
    is_open: bool
    assumed: tuple[str, ...]

    @property
    def parameters(self) -> float:
        """Parameters that a token passes."""
        return self.model.active_parameters_at(self.job["batch"]["sequence"])

    def describe_job(self, kind: SizedNode, nodes: int) -> Fields:
        """Returns the job on so many nodes, as plain data; its plan may be open."""
        job = copy.deepcopy(self.job)
        gpus = nodes * kind.gpus_per_node
        job["cluster"] = kind.describe(nodes)
        job["batch"] = {**job["batch"], "global": self.limits.choose(gpus)}
        plan = job["plan"]
        if isinstance(plan, dict) and "tp" not in plan and self.is_open and "auto" not in plan and "mesh" not in plan:
            plan["tp"] = [2**power for power in range(int(math.log2(kind.gpus_per_node)) + 1)]
        if kind.price is not None:
            job["run"] = {**job["run"], "price_per_gpu_hour": kind.price.value}
        return job


def read_question(
    source: str | Path | SomeFields,
    options: SizeOptions,
    changes: Sequence[str] = (),
    base: str | Path | None = None,
    of_command: bool = False,
) -> SizeQuestion:
    """Returns the question about a job or a model.

    source: a job file, a launch file, a mapping of one of them, the name of a model, or its config.json.
    changes: to make to the job first. base: folder of relative paths. of_command: whether errors name flags.
    Raises PlanError, ModelError or CatalogError for what is wrong or missing.
    """
    data, folder, origin = _read_source(source, changes)
    folder, assumed = folder if base is None else Path(base), list[str]()
    with locate_errors(*origin):
        cluster = data.pop("cluster", None)
        tokens = _find_tokens(data, options, "--tokens" if of_command else "tokens")
        shape = _fill_batch(data, folder, assumed)
        _fill_plan(data, assumed)
        kinds = list_kinds(options, cluster, folder, data["run"].get("price_per_gpu_hour"), of_command)
        limits = _find_limits(data["batch"], options, tokens, shape, "--batch" if of_command else "batch")
    _check_budget(options, kinds, "--price" if of_command else "price")
    return SizeQuestion(
        job=data,
        model=shape.model,
        base=folder,
        origin=origin,
        kinds=kinds,
        tokens=tokens,
        days=options.days,
        budget=options.budget,
        limits=limits,
        most_gpus=options.most_gpus,
        is_open=has_open_fields(data),
        assumed=tuple(assumed),
    )


def _read_source(source: str | Path | SomeFields, changes: Sequence[str]) -> tuple[Fields, Path, JobOrigin]:
    """Returns a job as plain data, its folder and its file; of a model alone a job of that model."""
    model = _find_model_alone(source)
    read = read_job(source if model is None else {"model": model}, changes)
    return dict(read.data), read.folder, read.origin


def _find_model_alone(source: str | Path | SomeFields) -> str | None:
    """Returns the model that a name or a config.json states; None: it is a job."""
    if isinstance(source, Mapping):
        return None
    path = Path(source)
    if not path.exists():
        return str(source) if find_model(str(source)) is not None else None
    if path.suffix.lower() == ".json" and path.is_file():
        data = read_yaml(path, str(source), PlanError).data
        if isinstance(data, dict) and "model_type" in data and not {"model", "cluster"} & data.keys():
            return str(path)
    return None


def _find_tokens(data: Fields, options: SizeOptions, where: str) -> float:
    """Returns the tokens of the training, and makes them those of the job."""
    run = dict(data.get("run") or {})
    if options.tokens is not None:
        run["tokens"] = options.tokens
        run.pop("steps", None)
    if run.get("tokens") is None:
        raise PlanError(where, "how many tokens are trained on is not stated", f"Write {where} 10T", None)
    for key in ("days", "steps"):
        if run.get(key) is not None:
            raise PlanError(f"run.{key}", "a question of size is about the tokens of a training", "Leave it out")
    data["run"] = run
    return float(load_run_tokens(run))


def load_run_tokens(run: SomeFields) -> float:
    """Returns the tokens of a run as a number."""
    from meshcast.hardware.load import validate_data
    from meshcast.simulator.job.job import RunLength

    tokens = validate_data(RunLength, {"tokens": run["tokens"]}, "run", PlanError).tokens
    assert tokens is not None
    return tokens


def _fill_batch(data: Fields, folder: Path, assumed: list[str]) -> Job:
    """Fills sequence and micro-batches of a job that does not state them; returns the job on a single node."""
    batch = dict(data.get("batch") or {})
    if batch.get("lengths") is not None or batch.get("microbatches") is not None:
        rule = "a question of size takes micro-batches of one size, whose number follows"
        raise PlanError("batch", rule, "Write batch.sequence, and batch.global or limits", None)
    shown: Fields = {"model": data.get("model"), "cluster": "dgx-h100:1", "plan": {}}
    sequence = batch.get("sequence")
    if sequence is None:
        sequence = min(SEQUENCE, load_job(shown, base=folder).model.seq)
        assumed.append(f"sequences of {sequence:,} tokens (batch.sequence)")
    job = load_job({**shown, "batch": {"global": 8, "sequence": sequence}}, base=folder)
    batch["sequence"] = job.batch.sequence
    if "micro" not in batch and not data.get("plan"):
        batch["micro"] = list(MICRO)
    data["batch"] = batch
    return job


def _fill_plan(data: Fields, assumed: list[str]) -> None:
    """Opens the plan of a job that states none. Raises PlanError for a plan of a single number of GPUs."""
    plan = data.get("plan")
    if not plan:
        data["plan"] = dict(read_shipped(PLAN).data)
        assumed.append("the best of the plans of Megatron-LM at each size, tensor parallelism inside a node (plan)")
    elif isinstance(plan, Mapping):
        for key in ("mesh", "dp", "stages", "replicas"):
            if plan.get(key) is not None:
                rule = "a plan with it is one of a single number of GPUs"
                remedy = "Leave it out: data parallelism takes the remaining GPUs; or search: --set plan=auto"
                raise PlanError(f"plan.{key}", rule, remedy, None)


def _find_limits(batch: SomeFields, options: SizeOptions, tokens: float, shape: Job, where: str) -> BatchLimits:
    """Returns the limits of the batch: as stated, as those of the job, or by the law. shape: the job on some node."""
    sequence, stated = int(batch["sequence"]), batch.get("global")
    if options.batch is not None:
        return read_limits(options.batch, sequence, where)
    if isinstance(stated, int) and stated > 0:
        return BatchLimits(stated, stated, "that of the job")
    if stated is not None:
        raise PlanError("batch.global", "it is a number of sequences", f"Write a number, or limits as {where}", stated)
    return limit_by_law(shape.model.active_parameters_at(sequence), tokens, sequence)


def _check_budget(options: SizeOptions, kinds: Sequence[SizedNode], where: str) -> None:
    """Raises PlanError for a budget and a kind of node without a price."""
    unpriced = [kind.name for kind in kinds if kind.price is None]
    if options.budget is not None and unpriced:
        rule = f"a budget needs prices, and no list price of {unpriced[0]} is known"
        raise PlanError(where, rule, f"Write {where} {unpriced[0]}=2.50", None)
