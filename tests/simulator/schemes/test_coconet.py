"""CoCoNeT: all-reduces fused with what follows them, and overlapped with the GEMM before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Memory
from meshcast.validation.contract.checked import layer_problems, lowered_layer
from meshcast.validation.contract.measure import list_ops, make, sent_bytes

MODEL_OF_CLAIM = {"layers": 4, "hidden": 3072, "heads": 32, "vocab": 51200, "seq": 1024, "dropout": 0.1}
FORWARD = {"mode": "forward-only"}

COCONET, MEGATRON = "tensor/coconet", "tensor/megatron"


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("options", [{"schedule": "split"}, {"schedule": "fuse"}, {}, {"chunks": 3}], ids=str)
def test_reductions_are_fused_with_what_follows_them(options: dict[str, Any], attention: str, p: int) -> None:
    """Data flow and placement hold, and of both point-wise kernels of a layer a rank does 1/p, or the messages do."""
    mesh = Mesh({"tp": p})
    schemes = [make(COCONET, mesh, **options), make(MEGATRON, mesh, ("tp",))]
    assert layer_problems(mesh, lambda: schemes, attention=attention) == []
    with_it, alone = (lowered_layer(mesh, some, False, attention).fragment for some in (schemes, schemes[1:]))
    fused, whole = (
        [op.work for op in one.forward if isinstance(op.work, Memory) and op.work.what == "residual"]
        for one in (with_it, alone)
    )
    shards = [replace(work, read=work.read // p, write=work.write // p) for work in whole]
    assert fused == (shards if options.get("schedule") == "split" else [])
    assert sent_bytes(with_it.forward, mesh) == pytest.approx(sent_bytes(alone.forward, mesh))
    assert list_ops(with_it.backward)[1:] == list_ops(alone.backward)[1:], "backward passes stay as they are"


def test_what_coconet_saves_is_at_most_the_shorter_of_gemm_and_all_reduce() -> None:
    layer = {"model": MODEL_OF_CLAIM, "cluster": "dgx-2:1", "batch": {"global": 8, "micro": 8}, "train": FORWARD}
    times = []
    for schemes in ([], [{"use": COCONET, "schedule": "fuse"}], [{"use": COCONET}]):
        plan = {"mesh": {"tp": 16}, "schemes": [*schemes, {"use": MEGATRON, "over": "tp"}]}
        times.append(simulate({**layer, "precision": {"compute": "fp16"}, "plan": plan}).step_time)
    assert times[0] > times[1] > times[2] > times[0] / 2


@pytest.mark.parametrize("schedule", ["split", "fuse", "overlap"])
def test_a_sum_of_two_all_reduces_is_fused_with_the_later_one(schedule: str) -> None:
    """Attention and MLP of a parallel residual have one addition, which waits for both."""
    model = {"layers": 2, "hidden": 256, "heads": 8, "vocab": 1024, "seq": 128, "parallel_residual": True}
    plan = {"mesh": {"tp": 8}, "schemes": [{"use": COCONET, "schedule": schedule}, {"use": MEGATRON, "over": "tp"}]}
    job = {"model": model, "cluster": "dgx-a100:1", "batch": {"global": 2, "micro": 2}, "plan": plan}
    played, other = (simulate(job, engine=engine) for engine in ("matrices", "simpy"))
    assert played.step_time == pytest.approx(other.step_time, rel=1e-9)
