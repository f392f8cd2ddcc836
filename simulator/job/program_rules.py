"""Rules of training programs: what the program of a framework does not have, and what it refuses.

They are data of a framework (key ``rules`` of its file): `has` lists the values of a fact that the program has,
`refuses` names conditions of this module under which it stops at its start. Each cites the program's code. A fact is a
number or a word of a plan by the name that it has in a point of a search, so the same rules check jobs and points.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import validate_data
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field
from meshcast.simulator.ir.graph_parts import CudaGraphs
from meshcast.simulator.job.framework import framework_rules, framework_versions
from meshcast.simulator.job.job import Job, LongPlan
from meshcast.simulator.job.plan_keys import PLAN_KEYS
from meshcast.simulator.job.release import Month, find_month
from meshcast.simulator.job.shorthand import family_degree
from meshcast.simulator.models.model import Model

Facts = Mapping[str, Any]
"""Numbers and words of a job by their names; None: it has no such thing, as a job without pipeline has no schedule."""

NAMES: Mapping[str, str] = {
    "schedule": "pipeline schedule",
    "rank_order": "order of the ranks",
    "data": "data scheme",
    "sequence": "context-parallel scheme",
    "tensor": "tensor scheme",
    "tensor_overlap": "overlap of tensor parallelism",
    "expert": "expert scheme",
    "padding": "padding of",
    "recomputation": "recomputation",
    "modules": "recomputation of the module",
    "offloaded": "offload of",
    "compute": "compute format",
}
"""Facts of which a program may have some values only, and their names in messages."""

DEGREES = {"tp": "tensor", "pp": "pipeline", "cp": "sequence", "dp": "data"}
"""Families of schemes by the short names of their degrees."""


class RulePart(BaseModel):
    """Base class of the parts of the rules; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class AvailableValues(RulePart):
    """The values of a fact that a program has.

    key: of the job, which states the fact.
    values: the values.
    since: of values that not all releases of the profile have, the first month whose releases do.
    source: the file of the program that says so.
    """

    key: str
    values: tuple[str, ...]
    since: dict[str, Month] = {}
    source: str = Field(min_length=10)

    def at_release(self, month: str) -> AvailableValues:
        """Returns the values that the releases of a month have."""
        return self.model_copy(
            update={"values": tuple(value for value in self.values if self.since.get(value, month) <= month)}
        )


class RefusedCondition(RulePart):
    """A condition under which a program stops at its start.

    rule: its name in `CONDITIONS`.
    key: of the job, which states what breaks it.
    since: the first month whose releases stop.
    until: the first month whose releases no longer do.
    source: the file of the program that checks it.
    """

    rule: str
    key: str
    since: Month | None = None
    until: Month | None = None
    source: str = Field(min_length=10)

    def holds_at(self, month: str) -> bool:
        """Returns whether the releases of a month stop."""
        return (self.since is None or self.since <= month) and (self.until is None or month < self.until)


class ProgramRules(RulePart):
    """The rules of a program.

    code: repository and commit of the files that the rules cite, but for sources that name theirs.
    """

    code: str = Field(min_length=10)
    has: dict[str, AvailableValues] = {}
    refuses: tuple[RefusedCondition, ...] = ()

    def cite(self, rule: AvailableValues | RefusedCondition) -> str:
        """Returns repository, commit and file of a rule."""
        return rule.source if "@" in rule.source else f"{self.code}: {rule.source}"

    def at_release(self, month: str) -> ProgramRules:
        """Returns the rules of the releases of a month."""
        has = {name: available.at_release(month) for name, available in self.has.items()}
        return self.model_copy(
            update={"has": has, "refuses": tuple(refused for refused in self.refuses if refused.holds_at(month))}
        )


@dataclass(frozen=True)
class Condition:
    """A condition under which programs stop.

    facts: names of the facts that decide it, which are the parameters of `explain`.
    explain: returns what is wrong in words; empty if nothing is.
    """

    facts: tuple[str, ...]
    explain: Callable[..., str]

    def check(self, facts: Facts) -> str:
        """Returns what is wrong in words; empty if nothing is, or if the job lacks a fact."""
        values = [facts[name] for name in self.facts]
        return "" if any(value is None for value in values) else self.explain(*values)


CONDITIONS: dict[str, Condition] = {}
"""All conditions by their names."""


def _condition(explain: Callable[..., str]) -> Callable[..., str]:
    """Registers a condition, whose name is that of the function."""
    name = explain.__name__.strip("_").replace("_", "-")
    CONDITIONS[name] = Condition(tuple(inspect.signature(explain).parameters), explain)
    return explain


# -------------------------------------------------------------------------------------- conditions of heads and lengths


@_condition
def _key_heads_by_tensor_ranks(tp: int, model: Model) -> str:
    broken = not model.mla and model.kv_heads % tp and not model.heads % tp  # of padded heads another rule speaks
    return f"{tp} tensor ranks do not divide {model.kv_heads} key/value heads" if broken else ""


@_condition
def _key_heads_divide_tensor_ranks(tp: int, model: Model) -> str:
    if model.mla or model.heads % tp or not (model.kv_heads % tp and tp % model.kv_heads):
        return ""
    return f"{tp} tensor ranks are neither a divisor nor a multiple of {model.kv_heads} key/value heads"


@_condition
def _heads_by_sequence_ranks(cp: int, sequence: str, model: Model) -> str:
    if sequence != "ulysses":
        return ""
    if model.heads % cp:
        return f"{cp} sequence ranks do not divide {model.heads} heads"
    if model.kv_heads % cp and cp % model.kv_heads:
        return f"{cp} sequence ranks are neither a divisor nor a multiple of {model.kv_heads} key/value heads"
    return ""


@_condition
def _sequence_by_context_ranks(cp: int, sequence_length: int) -> str:
    if cp == 1 or sequence_length % (2 * cp) == 0:
        return ""
    return f"a sequence of {sequence_length:,} tokens is no multiple of 2 x {cp} context ranks"


@_condition
def _sequence_by_tensor_and_context_ranks(tp: int, cp: int, sequence_length: int) -> str:
    if tp * cp == 1 or sequence_length % (2 * tp * cp) == 0:
        return ""
    return f"a sequence of {sequence_length:,} tokens is no multiple of 2 x {tp} tensor ranks x {cp} context ranks"


# ---------------------------------------------------------------------------------------------- conditions of pipelines


@_condition
def _groups_of_microbatches(schedule: str, pp: int, group: int, microbatches: int) -> str:
    if schedule != "interleaved-1f1b":
        return ""
    if group < pp:
        return f"interleaved chunks run at least pp {pp} micro-batches in a row, not {group}"
    if group > microbatches:
        return f"interleaved chunks run {group} micro-batches in a row, and a replica has {microbatches}"
    if 0 < (rest := microbatches % group) < pp:
        return f"interleaved chunks run groups of {group}: of {microbatches} micro-batches the last {rest} miss pp {pp}"
    return ""


@_condition
def _interleaving_without_overlap(schedule: str, pp: int, overlap_pp: bool) -> str:
    if schedule != "interleaved-1f1b" or overlap_pp or pp > 2:
        return ""
    return f"interleaving over {pp} stages needs messages that overlap; without overlap it needs 3 stages or more"


@_condition
def _microbatches_of_1f1b(schedule: str, pp: int, microbatches: int) -> str:
    if schedule != "1f1b" or microbatches >= pp:
        return ""
    return f"1F1B over {pp} stages needs as many micro-batches, and a replica has {microbatches}"


@_condition
def _microbatches_of_dualpipe_v(schedule: str, pp: int, microbatches: int) -> str:
    if schedule != "dualpipe-v" or microbatches >= 2 * pp:
        return ""
    return f"DualPipeV over {pp} ranks needs {2 * pp} micro-batches, and a replica has {microbatches}"


@_condition
def _whole_rounds(schedule: str, pp: int, microbatches: int) -> str:
    rounds = max(1, microbatches // pp)
    if schedule not in ("interleaved-1f1b", "interleaved-zb") or microbatches % rounds == 0:
        return ""
    return f"{schedule} over {pp} stages has {rounds} rounds, which do not divide {microbatches} micro-batches"


@_condition
def _tied_embedding_with_pipeline(pp: int, model: Model) -> str:
    return "tied embedding and output layer do not go with pipeline parallelism" if pp > 1 and model.tied else ""


@_condition
def _zb_h1_without_sequence_parallel(schedule: str, tensor: str) -> str:
    return "zb-h1 does not go with sequence parallelism" if schedule == "zb-h1" and tensor == "megatron-sp" else ""


# ------------------------------------------------------------------------------------------------ conditions of schemes


@_condition
def _sharded_gradients_with_pipeline(pp: int, data: str) -> str:
    if pp == 1 or data in ("ddp", "zero-1", "one-bit-adam"):
        return ""
    return f"{data} shards gradients or weights, which does not go with pipeline parallelism: zero-1 or none does"


@_condition
def _sharded_weights_with_experts(data: str, ep: int, tp: int, cp: int) -> str:
    if data not in ("zero-3", "zero-infinity", "zero-plus-plus", "mics") or ep == 1 or tp * cp == 1:
        return ""
    return f"{data} with expert parallelism goes with neither tensor nor sequence parallelism"


@_condition
def _whole_states_alone(data: str, tp: int, pp: int, cp: int) -> str:
    if data != "ddp" or tp * pp * cp == 1:
        return ""
    return "states that are not sharded (DDP) go with no tensor, context or pipeline parallelism"


@_condition
def _whole_states_without_shards(data: str, tp: int, cp: int) -> str:
    if data != "ddp" or tp * cp == 1:
        return ""
    return "states that are not sharded (DDP) go with neither tensor nor context parallelism"


@_condition
def _offload_of_shards(offloaded: tuple[str, ...], data: str) -> str:
    if "optimizer" not in offloaded or data != "ddp":
        return ""
    return "only sharded states are offloaded, and ddp shards none"


@_condition
def _experts_in_one_copy(ep: int, etp: int, copies: int, dp: int, cp: int, tp: int) -> str:
    ranks = dp // copies * cp * tp
    if ep == 1 or ranks % (ep * etp) == 0:
        return ""
    return f"ep {ep} x etp {etp} do not divide the {ranks} ranks that share one copy of the states"


@_condition
def _copies_of_experts(ep: int, etp: int, copies: int, dp: int, cp: int, tp: int, model: Model) -> str:
    if model.moe is None or copies == 1 or (ranks := dp * cp * tp // (ep * etp)) % copies == 0:
        return ""
    return f"{copies} copies of the states do not divide the {ranks} data-parallel ranks of the experts"


@_condition
def _expert_tensor_ranks(ep: int, etp: int, tp: int) -> str:
    if ep > 1:
        return "" if etp in (1, tp) else f"experts are whole, or sharded over all {tp} tensor ranks"
    return "" if etp == tp else f"without expert parallelism experts are sharded over all {tp} tensor ranks"


@_condition
def _experts_with_sequence_parallel(tensor: str, model: Model) -> str:
    if model.moe is None or tensor != "megatron":
        return ""
    return "experts with tensor parallelism need sequence parallelism"


@_condition
def _overlap_with_sequence_parallel(tensor: str, overlap_tp: bool) -> str:
    return "overlapped tensor parallelism needs sequence parallelism" if overlap_tp and tensor == "megatron" else ""


@_condition
def _overlap_with_compile(tensor: str, overlap_tp: bool, compiles: bool) -> str:
    if not overlap_tp or not tensor or compiles:
        return ""
    return "overlapped tensor parallelism needs compiled layers"


@_condition
def _fsdp_in_rank_order(data: str, rank_order: str) -> str:
    return (
        "FSDP needs the usual order of the ranks"
        if f"data/{data}" == "data/fsdp" and rank_order == "dp-pp-cp-tp"
        else ""
    )


@_condition
def _overlapped_passes(overlap_passes: bool, pp: int, virtual_stages: int, ep: int, recomputation: str) -> str:
    if not overlap_passes:
        return ""
    if ep == 1:
        return "passes overlap with expert parallelism only"
    if pp > 1 and virtual_stages == 1:
        return "passes overlap in a pipeline with chunks only"
    return "overlapped passes do not go with full recomputation" if recomputation == "full" else ""


# ------------------------------------------------------------------------------------------------- conditions of memory


@_condition
def _every_nth_layer(recomputed_layers: int, pp: int, model: Model) -> str:
    layers = model.layers // pp
    if recomputed_layers >= layers or any(layers // every == recomputed_layers for every in range(1, layers + 1)):
        return ""
    return f"every n-th layer is recomputed: no n gives {recomputed_layers} of {layers}"


@_condition
def _every_layer(recomputed_layers: int, pp: int, model: Model) -> str:
    layers = model.layers // pp
    return (
        "" if recomputed_layers >= layers else f"all layers are recomputed or none, not {recomputed_layers} of {layers}"
    )


@_condition
def _full_recompute_with_graphs(recomputation: str, cuda_graphs: CudaGraphs) -> str:
    if recomputation != "full" or isinstance(cuda_graphs, bool):
        return ""
    return "full recomputation does not go with CUDA graphs of parts of a layer"


@_condition
def _fsdp_with_graphs(data: str, cuda_graphs: CudaGraphs) -> str:
    if f"data/{data}" not in ("data/zero-2", "data/fsdp") or isinstance(cuda_graphs, bool):
        return ""
    return "FSDP does not go with CUDA graphs of parts of a layer"


@_condition
def _graphs_of_padded_experts(model: Model, cuda_graphs: CudaGraphs) -> str:
    if isinstance(cuda_graphs, bool) or "moe" not in cuda_graphs or model.moe is None or model.moe.capacity:
        return ""
    return "experts that drop no tokens are in no CUDA graph of a layer"


@_condition
def _graphs_without_pipeline(pp: int, cuda_graphs: CudaGraphs) -> str:
    return "CUDA graphs do not go with pipeline parallelism" if pp > 1 and cuda_graphs else ""


@_condition
def _offloaded_layers_alone(offloaded_layers: int, pp: int, recomputation: str) -> str:
    if pp > 1:
        return "layers whose activations are offloaded do not go with pipeline parallelism"
    return "layers whose activations are offloaded do not go with recomputation" if recomputation != "none" else ""


@_condition
def _delayed_scaling_with_modules(compute: str, modules: tuple[str, ...]) -> str:
    wrong = sorted({"moe_act", "layernorm"} & {*modules})
    if compute != "fp8-delayed" or not wrong:
        return ""
    return f"delayed scaling does not go with recomputation of {' and '.join(wrong)}"


# ------------------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True)
class BrokenRule:
    """A rule of a program that a job breaks.

    program: name of the framework.
    key: of the job.
    words: what is wrong.
    source: repository, commit and file.
    stops: whether the program stops at its start; otherwise it does not have what the job names.
    """

    program: str
    key: str
    words: str
    source: str
    stops: bool

    def __str__(self) -> str:
        if self.stops:
            return f"{self.program} would refuse this: {self.words} ({self.source})"
        return f"{self.program} {self.words} ({self.source})"

    @property
    def flat_key(self) -> str:
        """The key among those of launch files."""
        section, _, name = self.key.partition(".")
        return f"plan.{PLAN_KEYS[name].flat}" if section == "plan" and name in PLAN_KEYS else self.key

    def to_dict(self) -> dict[str, str | bool]:
        """Returns the rule in the JSON answer."""
        return {"key": self.key, "rule": self.words, "source": self.source, "stops": self.stops}


NEWEST = "2099-12"
"""The month of the newest release of every program."""


@cache
def find_rules(framework: str, release: str | None = None) -> ProgramRules | None:
    """Returns the rules of the program of a framework; None where none are known: it runs every plan then.

    release: of the program; None: the newest that the profile describes.
    """
    data = framework_rules(framework)
    if not data:
        return None
    month = NEWEST if release is None else find_month(release, framework_versions(framework), "framework.release")
    return validate_data(ProgramRules, data, f"{framework}.rules", PlanError).at_release(month)


def check_facts(rules: ProgramRules, program: str, facts: Facts) -> Iterator[BrokenRule]:
    """Yields the rules that a job breaks. program: name of the framework."""
    for name, available in rules.has.items():
        if words := explain_missing(name, available.values, facts[name]):
            yield BrokenRule(program, available.key, words, rules.cite(available), False)
    for refused in rules.refuses:
        if words := CONDITIONS[refused.rule].check(facts):
            yield BrokenRule(program, refused.key, words, rules.cite(refused), True)


def explain_missing(name: str, values: Sequence[str], value: object) -> str:
    """Returns what of a fact a program does not have, in words; empty if it has all. values: that it has."""
    words = value if isinstance(value, tuple) else () if value is None else (value,)
    missing = [str(word) for word in words if word not in values]
    if not missing:
        return ""
    if not values:
        return "has no pipeline parallelism" if name == "schedule" else f"has no {NAMES[name]} {', '.join(missing)}"
    return f"has no {NAMES[name]} {', '.join(missing)}: it has {', '.join(values)}"


def broken_rules(job: Job) -> list[BrokenRule]:
    """Returns the rules of its program that a job breaks; of a job that states no framework none.

    Stages and replicas of different degrees are not checked: each has its facts.
    """
    rules = _rules_of_job(job)
    return [] if rules is None else [*check_facts(rules, job.framework.name, facts_of_job(job))]


SWITCHES = {
    **{"overlap.tp": "overlap_tp", "overlap.pp": "overlap_pp", "plan.schedule": "overlap_passes"},
    **{"cuda_graphs": "cuda_graphs", "compile": "compiles"},
}
"""Facts that recipes switch on, by the keys of what they set."""


def list_refused(job: Job) -> frozenset[str]:
    """Returns the keys of what a job takes from recipes of its program that this program refuses beside the rest of the
    job: its recipes never have them together."""
    switches = {key: SWITCHES[key] for key, *_ in job.taken if key in SWITCHES}
    rules = _rules_of_job(job) if switches else None
    if rules is None:
        return frozenset()
    facts = facts_of_job(job)
    conditions = [CONDITIONS[refused.rule] for refused in rules.refuses]
    broken = [condition for condition in conditions if condition.check(facts)]
    return frozenset(
        key
        for key, fact in switches.items()
        if any(not condition.check({**facts, fact: False}) for condition in broken)
    )


def _rules_of_job(job: Job) -> ProgramRules | None:
    """Returns the rules of the program that a job means; None without any, or where stages have separate facts."""
    if not job.means_program or job.plan.has_stages or job.plan.replicas:
        return None
    return find_rules(job.framework.name, job.release)


def facts_of_job(job: Job) -> Facts:
    """Returns the facts of a job whose stages are alike."""
    plan, batch, ranks = job.plan, job.batch, {short: family_degree(job.plan, name) for short, name in DEGREES.items()}
    whole = batch.total is not None and not batch.lengths
    ranks |= {"ep": 1, "etp": ranks["tp"]} | plan.views.get("experts", {})
    return {
        **{name: ranks[name] for name in (*DEGREES, "ep", "etp")},
        **shared_facts(job),
        **_facts_of_pipeline(plan, ranks["pp"]),
        **_facts_of_schemes(plan, ranks),
        **_facts_of_memory(plan),
        "padding": name_padding(job.model, ranks["tp"]),
        "microbatches": ((batch.total or 0) // (batch.micro * ranks["dp"]) or None) if whole else None,
    }


def _facts_of_pipeline(plan: LongPlan, pp: int) -> Facts:
    """Returns the schedule, its chunks, and where the stages are."""
    schedule, options = _join(_names_of(plan, "pipeline")), _options_of(plan)
    order = [axis for axis, size in plan.mesh.items() if size > 1]
    return {
        "schedule": schedule if pp > 1 else None,
        "virtual_stages": options.get("pipeline.chunks") or 1,
        "group": options.get("pipeline.group") or pp,
        "overlap_passes": bool(options.get("pipeline.overlap_passes")),
        "rank_order": "dp-pp-cp-tp" if "pp" in order[1:] else "pp-dp-cp-tp",
    }


def _facts_of_schemes(plan: LongPlan, ranks: Mapping[str, int]) -> Facts:
    """Returns the schemes of the axes; None for those of a single rank. ranks: by the short names of degrees."""
    accompanying, replicate = _names_of(plan, "tensor", over_axes=False), _options_of(plan).get("data.replicate")
    return {
        "data": _join(_names_of(plan, "data")) if ranks["dp"] * ranks["cp"] > 1 else None,
        "copies": plan.mesh.get(str(replicate), 1),
        "sequence": _join(_names_of(plan, "sequence")) if ranks["cp"] > 1 else None,
        "tensor": _join(_names_of(plan, "tensor")) if ranks["tp"] > 1 else None,
        "tensor_overlap": _join(accompanying) if ranks["tp"] > 1 else None,
        "expert": _join(_names_of(plan, "expert")) if ranks["ep"] > 1 else None,
    }


def _facts_of_memory(plan: LongPlan) -> Facts:
    """Returns what is recomputed and offloaded."""
    names, options = _names_of(plan, "memory", over_axes=False), _options_of(plan)
    offloads = "memory/offload" in {entry.use for entry in plan.schemes}
    words = [name.removeprefix("recompute-") for name in names if f"memory/{name}" != "memory/offload"]
    return {
        "recomputation": words[0] if words else "none",
        "modules": tuple(options.get("recompute-selective.modules", ("core_attn",))) if "selective" in words else (),
        "recomputed_layers": options.get("recompute-full.layers"),
        "offloaded": tuple(options.get("offload.what", ("activations",))) if offloads else (),
        "offloaded_layers": options.get("offload.layers"),
    }


def shared_facts(job: Job) -> Facts:
    """Returns the facts that no plan changes."""
    framework, overlap = job.framework, job.framework.overlap
    return {
        "model": job.model,
        "sequence_length": None if job.batch.lengths else job.batch.sequence,
        "compute": job.precision.compute,
        "cuda_graphs": framework.cuda_graphs,
        "compiles": framework.compile,
        "overlap_tp": overlap.tp,
        "overlap_pp": overlap.pp,
    }


def name_padding(model: Model, tp: int) -> str | None:
    """Returns what of a model is padded for its tensor ranks; None if they divide its heads."""
    return "heads" if model.heads % tp else None


def _options_of(plan: LongPlan) -> Facts:
    """Returns the options of the schemes that a plan states, behind the name of the family; of memory behind their
    names."""
    options = dict[str, object]()
    for entry in plan.schemes:
        family, _, name = entry.use.partition("/")
        for option, value in (entry.model_extra or {}).items():
            options[f"{name if family == 'memory' else family}.{option}"] = value
    return options


def _names_of(plan: LongPlan, family: str, over_axes: bool = True) -> list[str]:
    """Returns the names of the schemes of a family. over_axes: those with axes; otherwise those without, which in a
    family of axes accompany others."""
    return [
        entry.use.removeprefix(f"{family}/")
        for entry in plan.schemes
        if entry.use.startswith(f"{family}/") and bool(entry.over) == over_axes
    ]


def _join(names: Sequence[str]) -> str | None:
    """Returns the schemes of a family as a single word: programs have one of each, and no two together."""
    return " + ".join(names) or None
