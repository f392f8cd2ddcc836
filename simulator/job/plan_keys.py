"""The keys of a plan in short form: the table from which all that knows them is derived.

A key is a field of `ShortStage` or `ShortPlan`: its type and default, a `PlanKey`, and below it the sentence of
docs/job.md. From these follow the long form (``simulator.job.shorthand``), launch files, the fields of a search, the
schema and the docs. docs/add-a-plan-key.md shows what a further key takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from functools import cache
from typing import Annotated, Any, Literal

from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BeforeValidator, Field
from meshcast.simulator.job.batch import ClassOrder, Count, JobPart

Part = Literal["", "ranks", "layers", "stages", "passes", "named"]
"""What of a plan a search varies: its degrees, the ops of a layer, the stages, what acts between the passes, and what
is searched only where a job names it."""


@dataclass(frozen=True)
class PlanKey:
    """A key of a plan in short form.

    owner: what it is about: the mesh, the model, replicas, a family of schemes, or a scheme (``data/fsdp``).
    option: the option of a scheme of its owner that it states; ``use``: the scheme itself.
    chooses: the schemes of its family that its values choose in other words than their names.
    degree: the degree that must be above 1 for it to have an effect.
    usual: what a plan has without it, where its default is null; default: that in words, where it depends on others.
    part, point: what of a plan a search varies with it, and its name in a point; no part: it is not searched.
    auto: values that a search tries by default; none: they follow from the model and the cluster.
    saves: the value that needs least memory, which is tried where a plan does not fit.
    flat: its name among the flat keys of launch files, behind ``plan.``.
    sigma: standard deviation of log(step time) between its values, by which a plan without it is uncertain; none
        against full recomputation is 31 % (26 to 33) of a step, and the usual choice is more likely than not, sequence
        parallelism -0.5 % (-4 to 11).
    name: the name itself.
    """

    owner: str
    option: str = ""
    chooses: Mapping[Any, str] = field(default_factory=dict, hash=False)
    degree: str = ""
    usual: Any = None
    default: str = ""
    part: Part = ""
    point: str = ""
    auto: tuple[Any, ...] = ()
    saves: Any = None
    flat: str = ""
    sigma: float = 0.0
    name: str = ""

    @property
    def family(self) -> str:
        """The family of schemes that it is about, if any."""
        return self.owner.partition("/")[0]

    @property
    def words(self) -> str:
        """What a plan has without it, in words."""
        usual = str(self.usual).lower() if isinstance(self.usual, bool | int) else f"`{self.usual}`"
        return self.default or ("none" if self.usual == () else usual)

    def with_name(self, name: str, default: Any) -> PlanKey:
        """Returns the key with its name, and with what follows from it."""
        behind = f"{self.family}.{self.option}" if self.option else self.family if self.chooses else name
        behind = behind.removesuffix(".use")
        usual = default if self.usual is None else self.usual
        return replace(self, name=name, usual=usual, point=self.point or name, flat=self.flat or behind)


def _names(family: str, usual: str, degree: str = "", default: str = "") -> PlanKey:
    """Returns what a key is that names the scheme of a family."""
    return PlanKey(family, "use", degree=degree, usual=usual, default=default, part="named", point=family)


def _states(
    owner: str, option: str, usual: Any = None, default: str = "", auto: tuple[Any, ...] = (), saves: Any = None
) -> PlanKey:
    """Returns what a key is that states an option of a data scheme."""
    return PlanKey(owner, option, degree="dp", usual=usual, default=default, part="named", auto=auto, saves=saves)


def _refuse_flag(value: Any) -> Any:
    """Refuses true and false where words say how much is recomputed."""
    if isinstance(value, bool):
        raise ValueError(
            "words say what is recomputed. Write none, selective, operators or full, or modules like [norm, act]"
        )
    return value


Modules = Annotated[Literal["none", "selective", "operators", "full"] | tuple[str, ...], BeforeValidator(_refuse_flag)]
"""What is recomputed."""

NamedScheme = str | dict[str, Any]
"""A scheme by its name, or ``use:`` with its options."""

ZERO = {0: "ddp", 1: "zero-1", 2: "zero-2", 3: "zero-3"}
MEGATRON = {True: "megatron-sp", False: "megatron"}
RECOMPUTE = {"selective": "recompute-selective", "operators": "recompute-operators", "full": "recompute-full"}

CHUNKS = "1; 2 of V-shaped schedules; `interleaved-1f1b` and `interleaved-zb` need it stated"

LayerCount = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
"""Layers of a stage."""


class ShortStage(JobPart):
    """The ranks of a pipeline stage in short form: parallel degrees, with the default scheme for each axis."""

    tp: Annotated[Count, PlanKey("mesh", part="ranks")] = 1
    """ranks that share every matrix: `tensor/megatron-sp`"""
    dp: Annotated[Count | None, PlanKey("mesh", default="GPUs / (tp pp cp); 1 in an entry of `stages`")] = None
    """replicas"""
    cp: Annotated[Count, PlanKey("mesh", part="ranks")] = 1
    """ranks that share every sequence: `sequence/all-gather`"""
    ep: Annotated[Count, PlanKey("mesh", part="ranks")] = 1
    """ranks over which experts are distributed, out of the `dp x cp x tp` ranks of a stage: `expert/all-to-all`"""
    etp: Annotated[Count | None, PlanKey("mesh", part="ranks", default="1 where `ep` is above 1, else `tp`")] = None
    """ranks over which each expert is sharded"""
    zero: Annotated[Literal[0, 1, 2, 3], PlanKey("data", chooses=ZERO, part="passes", point="data")] = 1
    """states sharded over the replicas: the optimizer states (1, `data/zero-1`), also gradients (2), also weights (3);
    0: none (`data/ddp`)"""
    fsdp: Annotated[bool, PlanKey("data", chooses={True: "fsdp"})] = False
    """true: PyTorch FSDP (`data/fsdp`) in place of `zero`"""
    shard: Annotated[Count | None, PlanKey("data", part="passes", default="all", flat="replicate")] = None
    """replicas that share one copy of what `zero: 1` or `fsdp` shards; the other `dp / shard` hold copies of it, and
    all-reduce their gradient shards (hybrid sharding; `--num-distributed-optimizer-instances` of Megatron-LM is
    `dp / shard`, and so is `data_parallel_replicate_degree` of torchtitan)"""
    recompute: Annotated[
        Modules,
        PlanKey(
            "memory", chooses=RECOMPUTE, part="layers", auto=("none", "selective", "full"), flat="recompute", sigma=0.10
        ),
    ] = "none"
    """`none`; `selective` (attention's core: saves memory only with unfused attention); `operators` (all but attention,
    every second matrix product and what was sent: the `selective` of torchtitan, `memory/recompute-operators`); `full`
    (every layer from its input); or modules, `[norm, act, mla_up_proj]`, as [memory/recompute-selective](schemes.md)
    names them"""
    recompute_layers: Annotated[
        Count | None,
        PlanKey(
            "memory/recompute-full", "layers", default="all", part="layers", point="recomputed", flat="recompute.layers"
        ),
    ] = None
    """with `recompute: full`: layers of each stage (with `chunks`, of each virtual stage), from the first on, that are
    recomputed, as with `--recompute-method block --recompute-num-layers` of Megatron-LM"""
    offload: Annotated[
        tuple[Literal["activations", "optimizer"], ...],
        PlanKey("memory/offload", "what", part="stages", auto=((), ("optimizer",)), flat="offload"),
    ] = ()
    """`[optimizer]`, `[activations]` or both: kept in host memory (`memory/offload`)"""
    mlp_tiles: Annotated[Count | None, PlanKey("memory/tiled-mlp", "tiles", default="none", flat="mlp_tiles")] = None
    """tiles of a micro-batch's tokens whose MLPs are computed one after another, and again in the backward pass
    (`memory/tiled-mlp`: ALST)"""
    sequence_parallel: Annotated[
        bool,
        PlanKey("tensor", chooses=MEGATRON, degree="tp", part="layers", auto=(True, False), saves=True, sigma=0.03),
    ] = True
    """false: `tensor/megatron` in place of `megatron-sp`"""
    tp_scheme: Annotated[NamedScheme | None, _names("tensor", "megatron-sp", degree="tp", default="see `tp`")] = None
    """[tensor scheme](schemes.md) by its name, where `tp` is above 1: one with axes of its own (`summa-2d`, `3d`,
    `tesseract`, `transformers` ...) in place of `megatron-sp`, without `sequence_parallel`; or one that overlaps the
    communication of `megatron-sp` or `megatron` (`async-tp`, `userbuffers`, `flux`, `coconet`, `domino`)"""
    cp_scheme: Annotated[NamedScheme | None, _names("sequence", "all-gather", degree="cp")] = None
    """sequence scheme by its name, where `cp` is above 1: `ulysses`, `ring`, `megatron-cp`, `burst-attention`,
    `dist-flash-attn`, `wallfacer`, `fpdt` ..."""
    ep_scheme: Annotated[NamedScheme | None, _names("expert", "all-to-all")] = None
    """expert scheme by its name: `deepep`, `tutel`, `hybrid-ep`, `comet` ...; without expert parallelism only one with
    kernels of its own (`scattermoe`) makes a difference"""
    dp_scheme: Annotated[NamedScheme | None, _names("data", "zero-1", default="see `zero`")] = None
    """data scheme by its name, in place of `zero` and `fsdp`: `mics`, `zero-plus-plus`, `horovod`, `zero-offload` ...;
    `shard` as above, where the scheme has `replicate`"""
    reshard: Annotated[bool | None, _states("data/fsdp", "reshard", True, auto=(True, False), saves=True)] = None
    """of `fsdp`: false keeps weights gathered from the forward to the backward pass (`reshard_after_forward` of
    PyTorch)"""
    unit: Annotated[Count | None, _states("data/fsdp", "unit", 1, auto=(1, 2, 4))] = None
    """of `fsdp`: layers whose weights are gathered together"""
    prefetch: Annotated[
        Annotated[int, Field(strict=True, ge=0, le=3)] | None,
        _states("data/fsdp", "prefetch", default="1 where the framework overlaps, else 0", auto=(0, 1, 2)),
    ] = None
    """of `fsdp`: units gathered ahead of the one that computes, up to 3"""


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

    pp: Annotated[Count, PlanKey("mesh", part="stages")] = 1
    """pipeline stages"""
    schedule: Annotated[
        NamedScheme | None,
        PlanKey(
            "pipeline",
            "use",
            usual="1f1b",
            default="`1f1b`, or `interleaved-1f1b` if `chunks` is above 1",
            part="stages",
        ),
    ] = None
    """name, or `{use: NAME}` with its options, of any [pipeline schedule](schemes.md#pipeline-schedules);
    `meshcast list schedule NAME --p 4 --m 8` shows one"""
    chunks: Annotated[Count | None, PlanKey("pipeline", "chunks", usual=1, default=CHUNKS, part="stages")] = None
    """model chunks (virtual stages) per device; `pp x chunks` divides the layers, unless `partition` is given"""
    partition: Annotated[str | tuple[int, ...], PlanKey("pipeline", part="stages")] = "even"
    """layers of the stages: `even`; `ends-as-layers` (embedding and output layer count as a layer each, so the first
    and the last stage have one layer fewer than the others); `by-cost` (minimises the time of the slowest stage, with
    forecast costs of each kind of layer, of the embedding, and of the output layer with the loss, on each stage's own
    GPUs); `by-memory` (minimises the peak memory of the fullest device, profiled at a few partitions, as mCAP does:
    Dreuning et al. 2022, Euro-Par, pages 155-170); or a list with the layers of each of the `pp x chunks` stages"""
    order: Annotated[
        Literal["pp-dp-cp-tp", "dp-pp-cp-tp"],
        PlanKey("mesh", part="stages", point="mesh_order", auto=("pp-dp-cp-tp", "dp-pp-cp-tp")),
    ] = "pp-dp-cp-tp"
    """axes of the mesh, outermost first; `dp-pp-cp-tp` (`--use-tp-pp-dp-mapping` of Megatron-LM) puts the stages of a
    pipeline next to each other, and replicas on other nodes"""
    pad_heads: Annotated[bool, PlanKey("model")] = False
    """true: heads that the ranks do not divide are [padded](#padded-heads); false: refused"""
    stages: Annotated[tuple[dict[str, Any], ...], PlanKey("stages")] = ()
    """degrees of every pipeline stage, in place of `pp`; keys that
    [a stage](#stages-and-replicas-that-differ) leaves out are those of the plan"""
    replicas: Annotated[tuple[Replicas, ...], PlanKey("replicas")] = ()
    """kinds of data-parallel replicas that run different numbers of micro-batches, or have
    [stages of their own](#stages-and-replicas-that-differ)"""
    share: Annotated[Literal["even", "by-speed"], PlanKey("replicas")] = "even"
    """`by-speed`: replicas on every kind of node get as many micro-batches as make them finish together"""


PLAN_KEYS: Mapping[str, PlanKey] = {
    name: next(part for part in field.metadata if isinstance(part, PlanKey)).with_name(name, field.default)
    for name, field in ShortPlan.model_fields.items()
}
"""All keys by their names."""

PIPELINE_NUMBERS = "pp", "chunks"
"""Keys that say how many devices a pipeline has, and how many chunks of layers each."""

SCHEME_KEYS: Mapping[str, str] = {key.family: name for name, key in PLAN_KEYS.items() if key.option == "use"}
"""The key that names the scheme of a family, by family."""


@cache
def option_keys(family: str) -> tuple[PlanKey, ...]:
    """Returns the keys that are options of a scheme of a family."""
    return tuple(key for key in PLAN_KEYS.values() if key.owner.startswith(f"{family}/") and key.option)


@cache
def choosing_keys(family: str) -> tuple[PlanKey, ...]:
    """Returns the keys that choose schemes of a family in other words than their names; of two that do, the later
    counts."""
    return tuple(key for key in PLAN_KEYS.values() if key.family == family and key.chooses)


@cache
def keys_alike(name: str) -> tuple[str, ...]:
    """Returns the keys that choose the scheme that a key chooses or names, itself included; () if there are no two."""
    family = PLAN_KEYS[name].family
    names = [key.name for key in choosing_keys(family)]
    naming = SCHEME_KEYS.get(family)
    return (*names, naming) if names and naming and name in (*names, naming) else ()


def chosen_scheme(short: ShortStage, family: str) -> str:
    """Returns the name of the scheme of a family that a plan chooses without naming it."""
    values = ((key, getattr(short, key.name)) for key in reversed(choosing_keys(family)))
    return next(key.chooses[value] for key, value in values if value in key.chooses)


def state_scheme_name(family: str, name: str) -> dict[str, Any]:
    """Returns the keys by which a plan in short form has a scheme, and their values: the inverse of `chosen_scheme`, or
    the key that names the scheme."""
    keys = choosing_keys(family)[::-1]
    choice = {key.name: value for key in keys for value, scheme in key.chooses.items() if scheme == name}
    return {key.name: key.usual for key in keys} | choice if choice else {SCHEME_KEYS[family]: name}
