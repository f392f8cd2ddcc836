"""Shared by tests of expert schemes that overlap: one layer on a few ranks, what it sends, how long a round takes."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import READ_BY_HOST, Collective, Fragment, Gemm, Op
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.schemes.expert.shared.token_dispatch import find_rounds
from meshcast.validation.contract.measure import make, sent_bytes
from meshcast.validation.contract.of_experts import span
from tests.simulator.schemes.small_jobs import job_on

H, F, E, K, S = 32, 32, 32, 2, 64
TOKENS = S * H * 2
"""Bytes of the tokens of a rank, in bf16."""
TIMES = st.integers(1, 64).map(lambda n: n / 8)


def layer(use: str, p: int = 4, experts: int = E, seq: int = S, **options: Any) -> Fragment:
    """One layer of experts on p ranks, one sequence on each."""
    mesh = Mesh({"dp": p}, {"experts": {"edp": 1, "ep": p}}, ["dp"])
    scheme = make(use, mesh, ("ep",), **options)
    moe = {"experts": experts, "top_k": K, "expert_ffn": F}
    model = scheme.adapt_model(Model(layers=1, hidden=H, heads=4, vocab=64, seq=seq, mlp_bias=False, moe=moe))
    stage = Architecture(model, 1, seq, 64, p).stage(range(1), False, False)
    (unit_run,) = Lowering(mesh, [make("data/ddp", mesh, ("dp",)), scheme]).run(stage).unit_runs
    return unit_run.fragment


def divided(use: str, p: int = 4, ep: int = 1, **options: Any) -> Fragment:
    """One layer of experts on p ranks, in `ep` groups whose ranks share every expert; one sequence on each rank."""
    mesh = Mesh({"dp": p}, {"experts": {"edp": 1, "ep": ep, "etp": p // ep}}, ["dp"])
    scheme = make(use, mesh, ("ep", "etp"), **options)
    moe = {"experts": E, "top_k": K, "expert_ffn": F}
    model = Model(layers=1, hidden=H, heads=4, vocab=64, seq=S, mlp_bias=False, moe=moe)
    stage = Architecture(model, 1, S, 64, p).stage(range(1), False, False)
    (unit_run,) = Lowering(mesh, [make("data/ddp", mesh, ("dp",)), scheme]).run(stage).unit_runs
    return unit_run.fragment


def of_tokens(fragment: Fragment) -> list[Op]:
    """Ops of the experts' streams without the exchanges of counts."""
    ops = (*fragment.forward, *fragment.backward)
    return [op for op in ops if op.stream.startswith("expert") and op.tag != READ_BY_HOST]


def moved(fragment: Fragment, phases: str = "FBW") -> list[Collective]:
    ops = [op for op in of_tokens(fragment) if op.phase in phases]
    return [op.work for op in ops if isinstance(op.work, Collective)]


@cache
def round_size(phase: str) -> tuple[int, float]:
    """Bytes of an exchange of all tokens, and FLOPs of the experts between two of them."""
    plain = next(one for one in find_rounds(layer("expert/all-to-all"), ["dp"]) if one.out.phase == phase)
    assert isinstance(plain.out.work, Collective)
    return plain.out.work.nbytes, sum(op.work.flops for op in plain.inside if op.work)


def taken(
    fragment: Fragment, exchange: float, computing: float, phase: str = "F", sending: float = 0, starting: float = 0
) -> float:
    """Seconds of a round, in which all tokens take `exchange` one way, and all kernels of the experts `computing`; in
    whatever parts, each takes `sending` and `starting` more."""
    whole, flops = round_size(phase)

    def lasts(op: Op) -> float:
        if op.phase != phase or op.work is None:
            return 0.0
        if isinstance(op.work, Collective) and op.stream == "expert":
            return sending + exchange * op.work.nbytes / whole
        begins = starting if "expert.up" in op.name and isinstance(op.work, Gemm) else 0.0
        return begins + (computing * op.work.flops / flops if "expert" in op.name else 0.0)

    return span(fragment.forward if phase == "F" else fragment.backward, lasts)


def all_sent(fragment: Fragment, mesh: Mesh) -> float:
    return sent_bytes(of_tokens(fragment), mesh)


def job(use: str, *more: dict[str, Any], ep: bool = True, **options: Any) -> dict[str, Any]:
    schemes = [
        {"use": "pipeline/1f1b", "over": "pp"},
        {"use": "data/zero-1", "over": "dp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
        {"use": use, "over": ["ep", "etp"], **options},
    ]
    sizes = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 64, "seq": 32, "tied": False}
    model = {**sizes, "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32, "shared_experts": 1}}
    mesh, views = {"pp": 2, "dp": 8, "tp": 2}, {"experts": {"edp": 2, "ep": 4, "etp": 2}}
    framework = {"name": "megatron-core"}
    return job_on(mesh, *schemes, *more, samples=32, model=model, views=views, framework=framework)
