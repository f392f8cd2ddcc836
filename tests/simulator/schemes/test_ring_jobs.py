"""Whole jobs whose sequences are sharded along one axis or two, and jobs that their schemes refuse."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.engine.play import ENGINES
from meshcast.simulator.ir.ops import Collective
from meshcast.validation.contract.played import play_job
from tests.draws import drawn
from tests.simulator.schemes.small_jobs import job_on

# ---------------------------------------------------------------------------------------------- whole jobs

SHAPE = {"layers": 4, "hidden": 96, "heads": 12, "kv_heads": 4, "vocab": 128, "seq": 96, "tied": False}
MLA = {"kv_lora_rank": 8, "qk_nope": 8, "qk_rope": 4, "v": 12, "q_lora_rank": None}
PLANS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "ring": [("ring", "far", {}), ("all-gather", "near", {})],
    "usp": [("ring", "far", {}), ("ulysses", "near", {})],
    "usp the other way round": [("ulysses", "far", {}), ("ring", "near", {"balance": "striped"})],
    "double ring": [("ring", "far", {"balance": "contiguous"}), ("ring", "near", {"balance": "contiguous"})],
    "eager": [("ring", "far", {"merge": "eager"}), ("ulysses", "near", {})],
    "eager double ring": [("ring", "far", {"merge": "eager"}), ("ring", "near", {"merge": "eager"})],
    "helpers": [("ulysses", "far", {}), ("dist-flash-attn", "near", {})],
    "megatron": [("megatron-cp", "far", {}), ("megatron-cp", "near", {"comm": "a2a"})],
}


def a_job(name: str, data: str = "data/zero-1", **more: Any) -> dict[str, Any]:
    schemes: list[dict[str, Any]] = [
        {"use": "pipeline/1f1b", "over": "pp"},
        {"use": data, "over": "dp"},
        *({"use": f"sequence/{use}", "over": axis, **options} for use, axis, options in PLANS[name]),
        {"use": "tensor/megatron-sp", "over": "tp"},
        *more.get("memory", ()),
    ]
    framework = {"name": "megatron-core", "set": {"attention": more.get("attention", "flash")}}
    mesh = {"pp": 2, "dp": 2, "far": 2, "near": 2, "tp": 2}
    return job_on(mesh, *schemes, samples=8, model=SHAPE | more.get("model", {}), framework=framework)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"data": "data/fsdp"},
    {"memory": [{"use": "memory/recompute-full"}]},
    {"memory": [{"use": "memory/recompute-selective", "modules": ["core_attn"]}]},
    {"memory": [{"use": "memory/recompute-selective", "modules": ["attention", "mlp"]}]},
    {"attention": "unfused"},
    {"attention": "unfused", "memory": [{"use": "memory/recompute-selective", "modules": ["core_attn"]}]},
    {"model": {"mla": MLA, "positions": "rope", "kv_heads": 12}},
]


JOBS = [
    (name, variant)
    for name in PLANS
    for variant in VARIANTS
    if name != "helpers" or variant.get("attention") != "unfused"
]
"""Helpers leave out blocks that unfused kernels compute."""


@pytest.mark.parametrize(("name", "variant"), drawn(JOBS, keep=2), ids=str)
def test_whole_jobs_do_all_work_once_and_leave_no_memory(name: str, variant: dict[str, Any]) -> None:
    played = play_job(a_job(name, **variant))
    assert all(peak.left == 0 for peak in played.peaks)
    assert min(min(peak.by.values()) for peak in played.peaks) >= 0
    wanted = played.wanted
    assert played.flops("F") == pytest.approx(wanted, rel=1e-12)
    backward = {"gemm": 2 * wanted["gemm"], "attention": 2.5 * wanted["attention"]}
    assert played.flops("B", "W") == pytest.approx(backward, rel=1e-12)
    assert (sum(played.flops("R").values()) > 0) == ("memory" in variant)
    # Gradients are summed over the ranks of all sequence schemes, too.
    reduced = {op.work.axes for _, op in played.instances() if op.stream == "data" and isinstance(op.work, Collective)}
    assert reduced == {("dp", "far", "near")}


def test_eager_merges_take_the_same_time_on_all_engines() -> None:
    spans = [play_job(a_job("eager double ring"), engine=engine).step.span for engine in ENGINES[:3]]
    assert spans == pytest.approx([spans[0]] * 3, rel=1e-9)


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_recompute_may_stand_anywhere_among_the_schemes(place: int) -> None:
    job = a_job("double ring")
    job["plan"]["schemes"].insert(place, {"use": "memory/recompute-selective", "modules": ["core_attn"]})
    played = play_job(job)
    assert all(peak.left == 0 for peak in played.peaks)
    assert played.flops("R")["attention"] == pytest.approx(played.wanted["attention"])


def test_other_tokens_and_tensor_ranks_commute() -> None:
    """Keys and values of a hop: 2 b s/p k/t elements with p ranks of a ring and t of tensor parallelism."""
    played = play_job(a_job("double ring"))
    works = [op.work for _, op in played.instances() if op.phase == "F" and isinstance(op.work, Collective)]
    hops = {work.nbytes for work in works if work.operation == "shift"}
    assert hops == {2 * 96 // 4 * 32 // 2 * 2}


# ---------------------------------------------------------------------------------------------- refusals


def test_slices_pass_where_heads_are_cut() -> None:
    job = a_job("ring")
    job["plan"]["schemes"][0] = {"use": "pipeline/seq1f1b", "over": "pp", "slices": 2}
    job["plan"]["schemes"][2] = {"use": "sequence/ulysses", "over": "far"}
    played = play_job(job)
    assert all(peak.left == 0 for peak in played.peaks)
    assert played.flops("F") == pytest.approx(played.wanted)
