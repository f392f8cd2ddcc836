"""Shared experts beside the exchanges of tokens: the same work in another order, which hides them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from meshcast.simulator.ir.ops import COMPUTE, Op
from meshcast.simulator.program.program import one_of
from meshcast.simulator.schemes.expert.shared.shared_expert_overlap import move_behind, moves_tokens
from meshcast.validation.contract.played import PAID, Played, play_job

MOE = {"experts": 16, "top_k": 4, "expert_ffn": 512, "shared_experts": 1}


def play(scheme: str, tp: int, **options: Any) -> Played:
    entries = [{"use": "data/zero-1", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}]
    job = {
        "model": {"layers": 2, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 512, "tied": False, "moe": MOE},
        "cluster": "dgx-h100:1",
        "framework": {"name": "megatron-core", "set": {"launch_s": 0.0}},
        "batch": {"global": 8, "micro": 1},
        "plan": {
            "mesh": {"dp": 8 // tp, "tp": tp},
            "views": {"experts": {"edp": 1, "ep": 8}},
            "schemes": [*entries, {"use": f"expert/{scheme}", "over": "ep", **options}],
        },
    }
    return play_job(job, PAID)


def layer_ops(played: Played) -> list[Op]:
    layer = next(run.fragment for run in one_of(played.stages[0]).unit_runs if run.name == "layer")
    return [op for op in (*layer.forward, *layer.backward) if op.stream != "host"]


def near(ops: list[Op], exchange: Op) -> list[str]:
    """The kernels behind an exchange up to those of routed experts or of the tokens' order."""
    names = [op.name for op in ops[ops.index(exchange) + 1 :] if op.stream == COMPUTE]
    stop = next(at for at, name in enumerate(names) if "expert." in name or "permute" in name)
    return names[:stop]


@pytest.mark.parametrize("scheme", ["all-to-all", "deepep", "hybrid-ep"])
@pytest.mark.parametrize("tp", [1, 2])
def test_shared_experts_run_beside_dispatch_and_combine(scheme: str, tp: int) -> None:
    plain, beside = (play(scheme, tp, overlap_shared=overlap) for overlap in (False, True))
    usual, ops = layer_ops(plain), layer_ops(beside)
    assert Counter((op.name, op.work) for op in ops) == Counter((op.name, op.work) for op in usual)
    assert all(not near(usual, op) for op in usual if moves_tokens(op))
    exchanges = [op for op in ops if moves_tokens(op)]
    assert [near(ops, op) for op in exchanges] == [
        ["shared.up", "shared.act"],
        ["shared.down"],
        ["dshared.down", "wshared.down"],
        ["dshared.act", "dshared.up", "wshared.up"],
    ]
    assert beside.step.span < plain.step.span
    assert beside.flops("F", "B", "W") == plain.flops("F", "B", "W")
    assert all(peak.left == 0 for peak in beside.peaks)


def test_what_moved_ops_need_moves_along() -> None:
    """f needs d, which is behind the place to which f moves; e needs f."""
    a, b = Op("a"), Op("b")
    d = Op("d", "network", after=[a])
    mark = Op("mark", after=[d])
    c, f = Op("c", after=[b]), Op("f", after=[mark])
    e = Op("e", "network", after=[f])
    assert "".join(op.name for op in move_behind([a, b, c, d, f, e], {f: a})) == "adfbce"
    assert "".join(op.name for op in move_behind([a, d, f, e, b, c], {f: b})) == "adbfec"
