"""How the quantities of the schemes' laws are measured on lowered and played programs.

A law names a quantity; the functions in `MEASURES` take a setting and the scheme and return it. Costs are ideal: given
times for pipelines, bytes and FLOPs counted for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulator.engine.memory import memory_events
from simulator.engine.program import Side
from simulator.forecast import device_params, lowered, resting
from simulator.frameworks import load_framework
from simulator.job import load_job
from simulator.leaves import EXPERTS
from simulator.lowering import Lowering
from simulator.mesh import Mesh
from simulator.models import Model
from simulator.models.blocks import Blocks
from simulator.ops import COMPUTE, Beside, Chain, Collective, Link, Op, Param
from simulator.plan import Plan
from simulator.schedule import PipelineSetting, Schedule
from simulator.scheme import Scheme, find_scheme
from validation import pipeline
from validation.pipeline import Case, Replay, replay

SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""Times (n-1)/n of the buffer that a ring sends per rank."""


def make(use: str, mesh: Mesh, over: Sequence[str] = (), **options: object) -> Scheme:
    """A scheme on a mesh, with the habits of megatron-core."""
    kind = find_scheme(use)
    return kind(tuple(over), kind.Options(**options), mesh, load_framework("megatron-core"))


def lowered_stage(
    model: Model,
    mesh: Mesh,
    schemes: Sequence[Scheme] = (),
    ends: tuple[bool, bool] = (False, False),
    layers: int = 1,
    regather: bool = False,
    **blocks: Any,
) -> Chain:
    """A stage of `layers` layers, with embedding and loss as `ends` says, one sample a data-parallel rank."""
    replicas = mesh.size(axis for scheme in schemes if scheme.family == "data" for axis in scheme.over)
    built = Blocks(model, 1, model.seq, model.vocab, replicas, **blocks)
    return Lowering(mesh, schemes, regather).run(built.stage(range(layers), *ends))


def forward_ops(chain: Chain) -> list[Op]:
    """The ops of the links' forward passes, each as often as it runs."""
    return [op for link in chain.links for _ in range(link.count) for op in link.fragment.forward]


def backward_ops(chain: Chain) -> list[Op]:
    """The ops of the links' backward passes, each as often as it runs."""
    return [op for link in reversed(chain.links) for _ in range(link.count) for op in link.fragment.backward]


def ops_beside(sides: Iterable[Beside | Side]) -> list[Op]:
    """The ops that schemes put beside the links, in issue order."""
    return [op for side in sides for op in side.ops]


def params_of(chain: Chain) -> list[Param]:
    """Every parameter of a stage, once for each layer that has it."""
    return [param for link in chain.links for _ in range(link.count) for param in link.fragment.params]


def listed(ops: Iterable[Op]) -> list[tuple[Any, ...]]:
    """Ops by what they do and when, and by the places of what they wait for."""
    ops = list(ops)
    place = {id(op): i for i, op in enumerate(ops)}

    def sources(op: Op) -> frozenset[int]:
        return frozenset((place[id(op)],)) if id(op) in place else frozenset().union(*map(sources, op.after))

    return [(*told(op), frozenset().union(*map(sources, op.after))) for op in ops]


def told(op: Op) -> tuple[Any, ...]:
    """What an op does, and when."""
    return op.name, op.stream, op.work, op.phase, op.when


def described(chain: Chain) -> tuple[Any, ...]:
    """All of a stage but the identity of its ops."""

    def of_link(link: Link) -> tuple[Any, ...]:
        fragment = link.fragment
        params = [(p.name, p.size, p.total) for p in fragment.params]
        touches = Counter((t.nbytes, t.op.name, t.made, t.category) for t in fragment.touches)
        ends = link.name, link.count, link.takes, link.gives, link.keys, link.nbytes
        return ends, listed(fragment.forward), listed(fragment.backward), params, touches

    return [of_link(link) for link in chain.links], listed(ops_beside((*chain.ahead, *chain.behind)))


def waits_for(op: Op) -> set[int]:
    """Identities of all that `op` waits for, near and far."""
    found: set[int] = set()
    left = list(op.after)
    while left:
        other = left.pop()
        if id(other) not in found:
            found.add(id(other))
            left += other.after
    return found


def sent(ops: Iterable[Op], mesh: Mesh) -> float:
    """Bytes that one rank sends in the collectives among `ops`."""
    found = 0.0
    for op in ops:
        assert op.work is None or op.stream == COMPUTE or isinstance(op.work, Collective)
        if isinstance(op.work, Collective):
            n = mesh.size(op.work.axes)
            found += SENT[op.work.operation] * (n - 1) / n * op.work.nbytes
    return found


def saved(link: Link) -> float:
    """Bytes of one copy that wait for the backward pass at the end of the forward pass.

    What comes in was counted where it was made, so what goes out counts here.
    """
    fragment = link.fragment
    events = memory_events(fragment.touches, fragment.forward, fragment.backward, link)
    made = [event for op in fragment.forward for event in events.get(id(op), ())]
    return sum(nbytes for _, _, nbytes, category in made if category == "activations")


@dataclass(frozen=True)
class LayerSetting:
    """A GPT layer (MHA, f = 4h, GELU, dropout, unfused attention) on t tensor ranks; b sequences of s tokens."""

    t: int = 1
    b: int = 1
    s: int = 64
    h: int = 128
    a: int = 8
    regather: bool = True
    attention: str = "unfused"
    more: tuple[tuple[str, tuple[tuple[str, object], ...]], ...] = field(default=())
    """Further schemes, with options."""

    def layer(self, use: str | None) -> tuple[Link, Mesh]:
        """The layers of a middle stage under the scheme `use`, and the mesh."""
        mesh = Mesh({"tp": self.t})
        model = Model(layers=8, hidden=self.h, heads=self.a, vocab=512, seq=self.s, dropout=0.1)
        schemes = [make(name, mesh, (), **dict(options)) for name, options in self.more]
        if use is not None:
            schemes.append(make(use, mesh, ("tp",) if use.startswith("tensor/") else ()))
        blocks = Blocks(model, self.b, self.s, 512, attention=self.attention)
        (link,) = Lowering(mesh, schemes, self.regather).run(blocks.stage(range(2), False, False)).links
        assert link.count == 2
        return link, mesh


def sent_per_layer(setting: LayerSetting | SequenceSetting | ExpertSetting, scheme: str) -> float:
    link, mesh = setting.layer(scheme)
    family = scheme.partition("/")[0]
    ops = [op for op in link.fragment.forward + link.fragment.backward if op.stream == family]
    return sent(ops, mesh)


def activations_per_layer(setting: LayerSetting, scheme: str) -> float:
    return saved(setting.layer(scheme)[0])


def _with(setting: LayerSetting, name: str) -> LayerSetting:
    return LayerSetting(**{**setting.__dict__, "more": ((name, ()),)})


def activations_per_layer_selective(setting: LayerSetting, scheme: str) -> float:
    return activations_per_layer(_with(setting, "memory/recompute-selective"), scheme)


def activations_per_layer_full(setting: LayerSetting, scheme: str) -> float:
    return activations_per_layer(_with(setting, "memory/recompute-full"), scheme)


def recomputed_forward_share(setting: LayerSetting, scheme: str) -> float:
    """FLOPs of recomputation over FLOPs of the forward pass, of one layer."""
    fragment = setting.layer(scheme)[0].fragment
    flops = {"F": 0.0, "R": 0.0, "B": 0.0, "W": 0.0}
    for op in fragment.forward + fragment.backward:
        flops[op.phase] += op.work.flops if op.work is not None else 0.0
    return flops["R"] / flops["F"]


@dataclass(frozen=True)
class SequenceSetting:
    """A layer on cp ranks that share b sequences of s tokens; keys and values are kv_width of h wide each."""

    cp: int = 1
    b: int = 1
    s: int = 48
    h: int = 64
    kv_width: int = 64
    regather: bool = True

    def layer(self, use: str) -> tuple[Link, Mesh]:
        mesh = Mesh({"cp": self.cp})
        model = Model(layers=1, hidden=self.h, heads=8, kv_heads=8 * self.kv_width // self.h, vocab=64, seq=self.s)
        blocks = Blocks(model, self.b, self.s, 64)
        lowering = Lowering(mesh, [make(use, mesh, ("cp",))], self.regather)
        (link,) = lowering.run(blocks.stage(range(1), False, False)).links
        return link, mesh


@dataclass(frozen=True)
class ExpertSetting:
    """A layer of `experts` experts over ep ranks, each of which has b sequences of s tokens (or of s of their tokens).

    A token takes top_k x capacity places. over: the axis whose ranks they are: dp, cp or tp (sequence parallel).
    """

    ep: int = 1
    b: int = 1
    s: int = 16
    h: int = 32
    experts: int = 8
    top_k: int = 2
    capacity: float | None = None
    over: str = "dp"

    @property
    def places(self) -> float:
        return self.top_k * (self.capacity or 1)

    @property
    def model(self) -> Model:
        moe = {"experts": self.experts, "top_k": self.top_k, "expert_ffn": 16, "capacity": self.capacity}
        seq = self.s * (1 if self.over == "dp" else self.ep)
        return Model(layers=1, hidden=self.h, heads=8, vocab=64, seq=seq, moe=moe)

    @property
    def expert_parameters(self) -> int:
        """Of one layer's routed experts."""
        return self.experts * self.model.mlp_parameters(16)

    def layer(self, use: str) -> tuple[Link, Mesh]:
        mesh = Mesh({self.over: self.ep}, {EXPERTS: {"edp": 1, "ep": self.ep}}, [self.over])
        others = {"dp": "data/ddp", "cp": "sequence/all-gather", "tp": "tensor/megatron-sp"}
        schemes = [make(others[self.over], mesh, (self.over,)), make(use, mesh, ("ep",))]
        model = self.model
        blocks = Blocks(model, self.b, model.seq, 64, self.ep if self.over == "dp" else 1)
        (link,) = Lowering(mesh, schemes).run(blocks.stage(range(1), False, False)).links
        return link, mesh


def expert_parameters(setting: ExpertSetting, use: str) -> int:
    link, _ = setting.layer(use)
    return sum(param.size for param in link.fragment.params if param.name.startswith(("wexpert", "bexpert")))


@dataclass(frozen=True)
class DataSetting:
    """A small GPT with an output layer of its own on n data-parallel ranks, with fp32 gradients and bf16 weights."""

    n: int = 4

    @property
    def model(self) -> Model:
        return Model(layers=2, hidden=64, heads=4, vocab=256, seq=32, tied=False)

    @property
    def grad_bytes(self) -> int:
        return 4 * self.model.parameters

    @property
    def weight_bytes(self) -> int:
        return 2 * self.model.parameters

    @property
    def last_weight_bytes(self) -> int:
        """Of the final norm and the output layer."""
        return 2 * (self.model.norm_parameters + self.model.hidden * self.model.vocab)

    def lowered(self, use: str) -> tuple[Chain, Plan]:
        plan = {"mesh": {"dp": self.n}, "schemes": [{"use": use, "over": "dp"}]}
        cluster = {"gpu": "h100-sxm", "gpus": self.n}
        ready = Plan(load_job({"model": self.model, "cluster": cluster, "plan": plan}))
        (chain,), _ = lowered(ready)
        return chain, ready


def sent_per_step(setting: DataSetting, use: str) -> float:
    chain, plan = setting.lowered(use)
    beside = ops_beside((*chain.ahead, *chain.behind))
    return sent(forward_ops(chain) + backward_ops(chain) + beside, plan.mesh)


def state_bytes_per_parameter(setting: DataSetting, use: str) -> float:
    chain, plan = setting.lowered(use)
    (params,) = device_params(plan, [chain])
    return sum(resting(plan, params).values()) / setting.model.parameters


def _replay(setting: PipelineSetting, use: str, hop: float = 0.0) -> Replay:
    return replay(_case(setting, use, hop))


def _case(setting: PipelineSetting, use: str, hop: float = 0.0) -> Case:
    shape = setting.shape
    name = use.partition("/")[2]
    times = {"t_f": setting.tf, "t_b": setting.tb, "t_w": setting.tw}
    return Case(schedule=name, p=shape.p, m=shape.m, v=shape.v // ways_of(use), hop=hop, **times)


def ways_of(use: str) -> int:
    """Ways of a schedule through its devices."""
    kind = find_scheme(use)
    assert issubclass(kind, Schedule)
    return kind.ways


def bubble(setting: PipelineSetting, use: str) -> float:
    return _replay(setting, use).makespan - setting.shape.m * setting.u


def bubble_span(setting: PipelineSetting, use: str) -> float:
    """The same of the longest span of a device, from its first start to its last end."""
    return max(_replay(setting, use).spans) - setting.shape.m * setting.u


def max_idle(setting: PipelineSetting, use: str) -> float:
    """The longest that a device is idle between the first start and the last end: pairs may be busy for less."""
    played = _replay(setting, use)
    return played.makespan - min(played.busy)


def most_in_flight_b(setting: PipelineSetting, use: str) -> int:
    """What the fullest device holds."""
    return max(in_flight_b(setting, use))


def in_flight_w(setting: PipelineSetting, use: str) -> list[int]:
    return _replay(setting, use).in_flight("W")


def most_in_flight_w(setting: PipelineSetting, use: str) -> int:
    return max(in_flight_w(setting, use))


def in_flight_b(setting: PipelineSetting, use: str) -> list[int]:
    return _replay(setting, use).in_flight("B")


def period(setting: PipelineSetting, use: str) -> float | None:
    """Time between two updates, without a flush."""
    return pipeline.period(_case(setting, use))


def weight_versions(setting: PipelineSetting, use: str) -> list[int] | None:
    return pipeline.versions(_case(setting, use))


def bubble_per_hop(setting: PipelineSetting, use: str) -> float:
    hop = min(setting.tf, setting.tb + setting.tw) / 8
    return (_replay(setting, use, hop).makespan - _replay(setting, use).makespan) / hop


MEASURES = {
    name: globals()[name]
    for name in (
        "sent_per_layer",
        "activations_per_layer",
        "activations_per_layer_selective",
        "activations_per_layer_full",
        "recomputed_forward_share",
        "expert_parameters",
        "sent_per_step",
        "state_bytes_per_parameter",
        "bubble",
        "bubble_span",
        "max_idle",
        "in_flight_b",
        "most_in_flight_b",
        "in_flight_w",
        "most_in_flight_w",
        "bubble_per_hop",
        "period",
        "weight_versions",
    )
}
