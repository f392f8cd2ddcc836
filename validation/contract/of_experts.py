"""Measures the closed forms of expert schemes on one layer whose experts are distributed over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isclose

from meshcast.hardware import load_cluster
from meshcast.hardware.records import dataclass
from meshcast.hardware.topology import reach
from meshcast.simulator.costs.collectives.dispatch import Dispatch
from meshcast.simulator.ir.capabilities import AdaptsModel
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.ops import READ_BY_HOST, Collective, Exchange, Gemm, Memory, Op, UnitRun
from meshcast.simulator.ir.routing import slowest_rank
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.parts import MoEShape
from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertSetting
from meshcast.simulator.schemes.expert.shared.token_dispatch import find_rounds
from meshcast.validation.contract.measure import make, remembered, sent_bytes
from meshcast.validation.contract.of_tensor import sent_per_layer

PLAIN = "expert/all-to-all"
"""The scheme whose rounds are neither split nor fused."""


@dataclass(frozen=True)
class ExpertLayer(ExpertSetting):
    """A layer at a setting."""

    @property
    def model(self) -> Model:
        sizes = {"experts": self.experts, "top_k": self.top_k, "expert_ffn": self.expert_ffn}
        moe = MoEShape.model_validate({**sizes, "capacity": self.capacity})
        seq = self.s * (1 if self.over == "dp" else self.ep)
        return Model(layers=1, hidden=self.h, heads=8, vocab=64, seq=seq, moe=moe)

    def layer(self, use: str) -> tuple[UnitRun, Mesh]:
        """The layer under the scheme `use`, and the mesh."""
        return _lower_layer(self, use)


@remembered
def _lower_layer(setting: ExpertLayer, use: str) -> tuple[UnitRun, Mesh]:
    mesh = Mesh({setting.over: setting.ep}, {EXPERTS: {"edp": 1, "ep": setting.ep}}, [setting.over])
    others = {"dp": "data/ddp", "cp": "sequence/all-gather", "tp": "tensor/megatron-sp"}
    options = dict(setting.options) if use != PLAIN else {}
    schemes = [make(others[setting.over], mesh, (setting.over,)), make(use, mesh, ("ep",), **options)]
    experts = schemes[-1]
    assert isinstance(experts, AdaptsModel)
    model = experts.adapt_model(setting.model)
    blocks = Architecture(model, setting.b, model.seq, 64, setting.ep if setting.over == "dp" else 1)
    (unit_run,) = Lowering(mesh, schemes).run(blocks.stage(range(1), False, False)).unit_runs
    return unit_run, mesh


def expert_parameters(setting: ExpertLayer, use: str) -> int:
    unit_run, _ = setting.layer(use)
    return sum(param.size for param in unit_run.fragment.params if param.name.startswith(("wexpert", "bexpert")))


def dispatch_calls(setting: ExpertLayer, use: str) -> list[Dispatch]:
    """The dispatches and combines, forward and backward, among ranks that lie on several nodes."""
    unit_run, mesh = setting.layer(use)
    description = {"gpu": "h100-sxm", "gpus": setting.ep, "gpus_per_node": setting.ep // setting.nodes}
    cluster = load_cluster(description)
    works = [op.work for op in (*unit_run.fragment.forward, *unit_run.fragment.backward)]
    return [Dispatch.of(work, reach(cluster, mesh.ranks(work.axes))) for work in works if isinstance(work, Exchange)]


def network_bytes(setting: ExpertLayer, use: str) -> float:
    return sum(call.network_bytes for call in dispatch_calls(setting, use))


def scale_up_bytes(setting: ExpertLayer, use: str) -> float:
    return sum(call.scale_up_bytes for call in dispatch_calls(setting, use))


def round_trip(setting: ExpertLayer, use: str, phase: str) -> float:
    """Seconds from the start of the first dispatch to the end of the last combine, at the times of the setting."""
    unit_run, mesh = setting.layer(use)
    whole, _ = setting.layer(PLAIN)
    mine = find_rounds(whole.fragment, mesh.axes)
    (plain,) = (trip for trip in mine if trip.out.phase == phase)
    flops = sum(op.work.flops for op in plain.inside if op.work is not None)
    assert isinstance(plain.out.work, Collective)
    sent = plain.out.work.nbytes
    issued = unit_run.fragment.forward if phase == "F" else unit_run.fragment.backward

    def op_seconds(op: Op) -> float:
        if op.phase != phase or op.work is None or op.tag == READ_BY_HOST:  # counts come before the first dispatch
            return 0.0
        if op.stream == "expert":
            assert isinstance(op.work, Collective)
            return setting.exchange_s * op.work.nbytes / sent
        return setting.compute_s * op.work.flops / flops if "expert" in op.name else 0.0

    return span(issued, op_seconds)


def span(issued: Sequence[Op], op_seconds: Callable[[Op], float]) -> float:
    """The end of the last op; each op follows the one before on its stream and all that it waits for."""
    ends: dict[Op, float] = {}
    free: dict[str, float] = defaultdict(float)

    def end(op: Op) -> float:
        if op not in ends:
            ends[op] = max((end(other) for other in op.after), default=0.0)
        return ends[op]

    for op in issued:
        begin = max([free[op.stream], *(end(other) for other in op.after)])
        ends[op] = free[op.stream] = begin + op_seconds(op)
    return max(ends.values())


def _first_gemm(setting: ExpertLayer, use: str) -> Gemm:
    """The first GEMM of the experts of a rank."""
    unit_run, _ = setting.layer(use)
    products = (op.work for op in unit_run.fragment.forward if op.name.startswith("expert.up"))
    return next(work for work in products if isinstance(work, Gemm))


def rows_per_layer(setting: ExpertLayer, use: str) -> float:
    """Rows that the experts of a rank compute, mean over ranks."""
    product = _first_gemm(setting, use)
    return product.batch * product.m


def padding(setting: ExpertLayer, use: str) -> float:
    """Padded rows of the most loaded rank over its other rows, under even routing."""
    product = _first_gemm(setting, use)
    rows = product.batch * product.m
    computed = sum(count * size for count, size in product.groups)
    assert isclose(rows * product.pace, computed, rel_tol=1e-6)
    return computed / rows - 1


def sent_by_the_busiest(setting: ExpertLayer, use: str) -> float:
    """Bytes that the rank with most to send or receive sends."""
    unit_run, mesh = setting.layer(use)
    ops = [op for op in (*unit_run.fragment.forward, *unit_run.fragment.backward) if op.stream == "expert"]
    return sent_bytes([replace(op, work=slowest_rank(op.work)) for op in ops], mesh)


def exchanges(setting: ExpertLayer, use: str) -> int:
    """Collectives of a layer among the ranks of the experts, forward and backward."""
    unit_run, _ = setting.layer(use)
    return sum(op.stream == "expert" for op in (*unit_run.fragment.forward, *unit_run.fragment.backward))


def dispatch_flops(setting: ExpertLayer, use: str) -> float:
    """FLOPs of the GEMMs that dispatch and combine tokens, forward and backward."""
    unit_run, _ = setting.layer(use)
    works = (op.work for op in (*unit_run.fragment.forward, *unit_run.fragment.backward))
    return sum(work.flops for work in works if isinstance(work, Gemm) and work.what == "dispatch")


def permuted_bytes(setting: ExpertLayer, use: str) -> float:
    """Bytes that kernels read and write which order tokens or add up their copies, forward and backward."""
    unit_run, _ = setting.layer(use)
    works = (op.work for op in (*unit_run.fragment.forward, *unit_run.fragment.backward))
    return sum(work.bytes for work in works if isinstance(work, Memory) and work.what == "permute")


DEGREE = (("degree", 2),)
"""Options of the schemes that split a round."""


def settings(kind: type[Scheme]) -> Iterator[ExpertLayer]:
    for ep in (1, 2, 4, 8):
        for b, s, h, top_k, capacity in ((1, 16, 32, 2, None), (2, 32, 64, 1, 1.25), (1, 8, 32, 6, 1.0)):
            for over in ("dp", "cp", "tp"):
                yield ExpertLayer(ep, b, s, h, 8, top_k, capacity, over)
    for ep, nodes in ((8, 1), (16, 2), (32, 4), (64, 8)):
        yield ExpertLayer(ep, experts=256, top_k=8, nodes=nodes)
    for exchange, computing in ((1.0, 0.25), (1.0, 1.0), (1.0, 3.0), (0.125, 8.0)):
        yield ExpertLayer(4, exchange_s=exchange, compute_s=computing)
        yield ExpertLayer(8, s=1024, h=512, exchange_s=exchange, compute_s=computing)
        if "wave" in kind.Options.model_fields:
            options = (("wave", 4), ("sms", 0), ("panel", 128))
            yield ExpertLayer(8, s=1024, h=512, exchange_s=exchange, compute_s=computing, options=options)
        for name, value, more in (("bits", 8, DEGREE), ("node", 4, DEGREE), ("micro", 2048, ())):
            if {name, *dict(more)} <= kind.Options.model_fields.keys():
                yield ExpertLayer(8, s=64, exchange_s=exchange, compute_s=computing, options=((name, value), *more))
        if {"node", "ratio"} <= kind.Options.model_fields.keys():
            for capacity in (None, 1.25):
                yield ExpertLayer(8, s=56, capacity=capacity, options=(("node", 4), ("ratio", 3.0)))
        if "degree" in kind.Options.model_fields:
            for degree in (1, 4, 8):
                degrees = (("degree", degree),)
                yield ExpertLayer(8, s=64, exchange_s=exchange, compute_s=computing, options=degrees)


MEASURES = {
    "sent_per_layer": sent_per_layer,
    "expert_parameters": expert_parameters,
    "rows_per_layer": rows_per_layer,
    "padding": padding,
    "exchanges": exchanges,
    "permuted_bytes": permuted_bytes,
    "dispatch_flops": dispatch_flops,
    "sent_by_the_busiest": sent_by_the_busiest,
    "network_bytes": network_bytes,
    "scale_up_bytes": scale_up_bytes,
    "forward_round": lambda setting, use: round_trip(setting, use, "F"),
    "backward_round": lambda setting, use: round_trip(setting, use, "B"),
}
