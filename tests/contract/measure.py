"""How the quantities of the schemes' laws are measured on lowered and played programs.

A law names a quantity; the functions in `MEASURES` take a setting and the scheme and return it. Costs are ideal: given
times for pipelines, bytes and FLOPs counted for the rest. `play_job` plays a whole job at ideal prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from simulator.engine.memory import Peak
from simulator.engine.program import Program, StageProgram, memory_events
from simulator.engine.simpy_engine import Times
from simulator.forecast import played
from simulator.frameworks import load_framework
from simulator.job import load_job
from simulator.lowering import Lowering, rests
from simulator.mesh import Mesh
from simulator.models import Model
from simulator.models.blocks import Blocks
from simulator.ops import Attention, Collective, Fragment, Gemm, Memory, Op, Transfer, Work
from simulator.plan import Plan
from simulator.schedule import PipelineSetting
from simulator.scheme import Scheme, find_scheme
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
) -> Fragment:
    """A stage of `layers` layers, with embedding and loss as `ends` says, one sample a data-parallel rank."""
    samples = mesh.size(axis for scheme in schemes if scheme.family == "data" for axis in scheme.over)
    built = Blocks(model, samples, model.seq, model.vocab, **blocks)
    return Lowering(mesh, schemes, regather).run(built.stage(layers, *ends))


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


def sent(ops: Sequence[Op], mesh: Mesh, axis: str) -> float:
    """Bytes that one rank sends in the collectives over `axis`."""
    n = mesh.size(axis)
    works = [op.work for op in ops if isinstance(op.work, Collective) and axis in op.work.axes]
    return sum(SENT[work.operation] * (n - 1) / n * work.nbytes for work in works)


def saved(fragment: Fragment) -> float:
    """Bytes that wait for the backward pass at the end of the forward pass."""
    events = memory_events(fragment.touches, fragment.forward, fragment.backward)
    return sum(nbytes for _, at_end, nbytes, category in events if not at_end and category == "activations")


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

    def stage(self, layers: int, use: str | None) -> tuple[Fragment, Mesh]:
        """A middle stage of `layers` layers under the scheme `use`."""
        mesh = Mesh({"tp": self.t})
        model = Model(layers=8, hidden=self.h, heads=self.a, vocab=512, seq=self.s, dropout=0.1)
        schemes = [make(name, mesh, (), **dict(options)) for name, options in self.more]
        if use is not None:
            schemes.append(make(use, mesh, ("tp",) if use.startswith("tensor/") else ()))
        blocks = Blocks(model, self.b, self.s, 512, attention=self.attention)
        return Lowering(mesh, schemes, self.regather).run(blocks.stage(layers, False, False)), mesh


def per_layer(setting: LayerSetting, use: str | None, measure) -> float:  # type: ignore[no-untyped-def]
    """`measure` of one layer more."""
    return measure(*setting.stage(3, use)) - measure(*setting.stage(2, use))


def sent_per_layer(setting: LayerSetting, scheme: str) -> float:
    return per_layer(setting, scheme, lambda fragment, mesh: sent(fragment.forward + fragment.backward, mesh, "tp"))


def activations_per_layer(setting: LayerSetting, scheme: str) -> float:
    return per_layer(setting, scheme, lambda fragment, mesh: saved(fragment))


def _with(setting: LayerSetting, name: str) -> LayerSetting:
    return LayerSetting(**{**setting.__dict__, "more": ((name, ()),)})


def activations_per_layer_selective(setting: LayerSetting, scheme: str) -> float:
    return activations_per_layer(_with(setting, "memory/recompute-selective"), scheme)


def activations_per_layer_full(setting: LayerSetting, scheme: str) -> float:
    return activations_per_layer(_with(setting, "memory/recompute-full"), scheme)


def recomputed_forward_share(setting: LayerSetting, scheme: str) -> float:
    """FLOPs of recomputation over FLOPs of the forward pass, of one layer."""

    def flops(phase: str):  # type: ignore[no-untyped-def]
        def count(fragment: Fragment, mesh: Mesh) -> float:
            ops = fragment.forward + fragment.backward
            return sum(op.work.flops for op in ops if op.phase == phase and op.work is not None)

        return count

    return per_layer(setting, scheme, flops("R")) / per_layer(setting, scheme, flops("F"))


@dataclass(frozen=True)
class DataSetting:
    """A small GPT on n data-parallel ranks, with fp32 gradients and bf16 weights."""

    n: int = 4

    @property
    def model(self) -> Model:
        return Model(layers=2, hidden=64, heads=4, vocab=256, seq=32)

    @property
    def grad_bytes(self) -> int:
        return 4 * self.model.parameters

    @property
    def weight_bytes(self) -> int:
        return 2 * self.model.parameters

    def fragment(self, use: str) -> tuple[Fragment, Mesh, Scheme]:
        mesh = Mesh({"dp": self.n})
        scheme = make(use, mesh, ("dp",))
        blocks = Blocks(self.model, self.n, 32, 256)
        return Lowering(mesh, [scheme], True).run(blocks.stage(2, True, True)), mesh, scheme


def sent_per_step(setting: DataSetting, use: str) -> float:
    fragment, mesh, _ = setting.fragment(use)
    return sent(fragment.forward + fragment.backward, mesh, "dp")


def state_bytes_per_parameter(setting: DataSetting, use: str) -> float:
    fragment, mesh, scheme = setting.fragment(use)
    size = sum(param.size for param in fragment.params)
    whole = {"parameters": 2, "gradients": 4, "optimizer": 12}
    return sum(size * n / mesh.size(rests([scheme], state)) for state, n in whole.items()) / setting.model.parameters


def _replay(setting: PipelineSetting, use: str, hop: float = 0.0) -> Replay:
    shape = setting.shape
    name = use.partition("/")[2]
    times = {"t_f": setting.tf, "t_b": setting.tb, "t_w": setting.tw}
    return replay(Case(schedule=name, p=shape.p, m=shape.m, v=shape.v, hop=hop, **times))


def bubble(setting: PipelineSetting, use: str) -> float:
    return _replay(setting, use).makespan - setting.shape.m * setting.u


def in_flight_b(setting: PipelineSetting, use: str) -> list[int]:
    return _replay(setting, use).in_flight("B")


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
        "sent_per_step",
        "state_bytes_per_parameter",
        "bubble",
        "in_flight_b",
        "bubble_per_hop",
    )
}


# ------------------------------------------------------------------------------------------- whole jobs


@dataclass(frozen=True)
class Ideal:
    """Prices without overheads: FLOPs, bytes of memory and bytes of buffers, each over one rate.

    latency: of a message between stages, which does not block its sender.
    """

    flops: float = 1e9
    memory: float = 1e8
    links: float = 1e7
    latency: float = 0.0

    def __call__(self, work: Work) -> tuple[float, float]:
        match work:
            case Gemm() | Attention():
                return work.flops / self.flops, 0.0
            case Memory():
                return work.bytes / self.memory, 0.0
        return work.nbytes / self.links, self.latency if isinstance(work, Transfer) else 0.0


PAID = Ideal()
"""Communication takes its time."""

FREE = Ideal(links=inf)
"""Communication costs nothing."""


@dataclass(frozen=True)
class Played:
    """A job as lowered and played."""

    plan: Plan
    stages: list[StageProgram]
    program: Program
    times: Times
    peaks: list[Peak]

    @property
    def ranks(self) -> int:
        """Ranks that each device of the pipeline stands for."""
        return self.plan.mesh.world // self.plan.shape.p

    def instances(self, device: int | None = None) -> Iterator[tuple[int, Op]]:
        """Every op that runs, with its number."""
        for (owner, _), queue in self.program.queues.items():
            if device in (None, owner):
                yield from ((number, self.program.ops[number]) for number in queue)

    def flops(self, *phases: str) -> dict[str, float]:
        """FLOPs over all ranks by kind of work, of the given phases."""
        found = {"gemm": 0.0, "attention": 0.0}
        for _, op in self.instances():
            if op.phase in phases and isinstance(op.work, Gemm | Attention):
                found["gemm" if isinstance(op.work, Gemm) else "attention"] += op.work.flops * self.ranks
        return found

    def category_peak(self, device: int, category: str) -> float:
        """The most bytes of one category at any moment."""
        changes = []
        for _, start, task in self.program.actions[device]:
            for place, at_end, nbytes, kind in task.events:
                if kind == category:
                    when = self.times.end if at_end else self.times.begin
                    changes.append((when[start + place], nbytes))
        held = top = 0.0
        for _, nbytes in sorted(changes):
            held += nbytes
            top = max(top, held)
        return top


def play_job(job: Mapping[str, Any], price: Any = PAID, changes: Iterable[str] = ()) -> Played:
    """Lowers and plays `job` as `simulate` does, at ideal prices."""
    plan = Plan(load_job(job, changes))
    return Played(plan, *played(plan, price))


def sent_between_stages(played: Played) -> dict[tuple[int, str], list[int]]:
    """Bytes of every message, by the virtual stage that sends it and the kind of action whose result it is."""
    found: dict[tuple[int, str], list[int]] = {}
    for number, _, _ in played.program.transfers:
        op = played.program.ops[number]
        assert isinstance(op.work, Transfer)
        stage, kind = stage_and_kind(op.name.removeprefix("send "))
        found.setdefault((stage, kind), []).append(op.work.nbytes)
    return found


def stage_and_kind(text: str) -> tuple[int, str]:
    """Stage and kind of an action that is printed like ``2BW0``."""
    stage = text[: next(i for i, letter in enumerate(text) if letter.isalpha())]
    return int(stage), "".join(letter for letter in text if letter.isalpha())
