"""Calls of the host by kind of op, in layers without experts: those of the profile, release by release."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest

from meshcast.simulator.ir.host_calls import CallKind, PassCalls, name_kind
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, HostLaunch, Memory, Op, Work
from meshcast.simulator.job.framework import Framework, load_framework
from meshcast.simulator.program.program import one_of
from meshcast.simulator.schemes.tensor.shared.tensor_overlap import PART_LAUNCHES, make_part
from meshcast.validation.contract.played import play_job

MEGATRON = load_framework("megatron-core")
SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "gated": True}


def job(name: str = "megatron-core", compute: str = "bf16", **model: Any) -> dict[str, Any]:
    return {
        "model": SHAPE | model,
        "cluster": {"gpu": "h100-sxm", "gpus": 1},
        "framework": {"name": name},
        "batch": {"global": 1},
        "precision": {"compute": compute},
        "plan": {},
    }


def layer(**changes: Any) -> dict[str, Op]:
    """The ops of a layer."""
    stage = one_of(play_job(job(**changes)).stages[0])
    fragment = max(stage.unit_runs, key=lambda run: run.count).fragment
    return {op.name: op for op in (*fragment.forward, *fragment.backward) if op.work is not None}


def share(kind: CallKind, phase: str = "F", framework: Framework = MEGATRON) -> float:
    """Launches of an op of this kind, by the calls of the profile."""
    return framework.calls[kind].of_phase(phase) / framework.calls["op"].forward


@pytest.mark.parametrize(("compute", "kind"), [("bf16", "linear"), ("fp8-delayed", "quantised-linear")])
def test_the_host_makes_the_calls_of_the_profile(compute: str, kind: CallKind) -> None:
    ops = layer(compute=compute)
    of_linear = [ops["proj"].launches, ops["dproj"].launches, ops["wproj"].launches]
    if compute == "bf16":
        assert of_linear == pytest.approx([share(kind), share(kind, "B"), share(kind, "W")])
    assert ops["proj"].launches == share(kind) and ops["wproj"].launches == share(kind, "W")
    assert ops["core"].launches == share("attention") and ops["residual1"].launches == share("residual")


@pytest.mark.parametrize(("norm", "vectors"), [("rmsnorm", 1), ("layernorm", 2)])
def test_gradients_of_vectors_of_weights_are_added_one_by_one(norm: str, vectors: int) -> None:
    assert layer(norm=norm)["dnorm1"].launches == pytest.approx(share("norm", "B") + vectors * share("vector", "W"))


def test_frozen_norms_have_no_gradients() -> None:
    frozen = play_job(job() | {"train": {"mode": "lora", "rank": 4, "targets": ["attn_qkv"]}})
    launches = {op.launches for _, op in frozen.instances() if op.name == "dnorm2"}
    assert launches == {share("norm", "B")}


def test_earlier_transformer_engines_make_more_calls() -> None:
    """Before 2.0 of 2025-02, before 1.3 of 2024-02, which reduces amaxes at once, and before 0.10 of 2023-06, which
    compiles their update."""
    releases = ("2023-05", "2023-12", "2024-12", "2025-06")
    each = {release: load_framework("megatron-core", {}, release).calls["quantised-linear"] for release in releases}
    for before, after in pairwise(each.values()):
        assert all(a >= b for a, b in zip(before, after, strict=True)) and sum(before) > sum(after)
    assert each == {release: load_framework("nemo", {}, release).calls["quantised-linear"] for release in releases}


def test_models_with_experts_and_programs_without_calls_launch_all_ops_alike() -> None:
    experts = job(moe={"experts": 4, "top_k": 2, "expert_ffn": 32})
    stage = one_of(play_job(experts).stages[0])
    ops = [op for run in stage.unit_runs for op in run.fragment.forward if op.name in ("launch qkv", "launch core")]
    assert {op.work.number for op in ops if isinstance(op.work, HostLaunch)} == {1.0}
    assert {op.launches for op in layer(name="torchtitan").values() if isinstance(op.work, Gemm)} == {1.0}


def test_parts_of_a_product_are_launched_with_it_and_a_call_each() -> None:
    product = Gemm(8, 8, 8)
    whole = Op("proj", work=product, launches=1.5)
    parts = [make_part(whole, i, 4, Gemm(2, 8, 8), []) for i in range(4)]
    assert sum(part.launches for part in parts) == pytest.approx(1.5 + 3 * PART_LAUNCHES)
    assert make_part(whole, 0, 1, product, []).launches == 1.5


WORKS: dict[CallKind, Work] = {
    "linear": Gemm(1, 1, 1),
    "quantised-linear": Gemm(1, 1, 1, dtype="fp8"),
    "collective": Collective("all_gather", 1, ("tp",)),
    "attention": Attention(1, 1, 1, 1, 1, 1, 1),
    **{kind: Memory(kind, 1, 1) for kind in ("rope", "residual", "add", "activation", "cast")},
    "norm": Memory("rms-norm", 1, 1),
    "other": Memory("scan", 1, 1),
}


def test_every_kind_of_calls_has_an_op() -> None:
    assert {kind: name_kind(work) for kind, work in WORKS.items()} == {kind: kind for kind in WORKS}
    assert {*WORKS, "vector", "op"} == {*get_args(CallKind)} == MEGATRON.calls.keys()
    assert [PassCalls(1, 2, 3).of_phase(phase) for phase in "FRBW"] == [1, 1, 2, 3]
