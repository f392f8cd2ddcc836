"""Several kinds of parallelism at once: limits of one kind, and bytes that are sharded or not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.ops import Collective
from meshcast.validation.contract.measure import sent_bytes
from meshcast.validation.contract.played import Played, play_job

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 64, "tied": False, "norm": "rmsnorm"}


def played(
    pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, data: str = "data/fsdp", m: int = 4, **options: Any
) -> Played:
    """A model of no biases on pp x dp x cp x tp ranks, `m` micro-batches a replica."""
    schemes = [
        {"use": "pipeline/1f1b", "over": "pp"},
        {"use": data, "over": "dp", **options},
        {"use": "sequence/ring", "over": "cp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
    ]
    job = {
        "model": MODEL,
        "cluster": {"gpu": "h100-sxm", "gpus": pp * dp * cp * tp},
        "batch": {"global": m * dp},
        "plan": {"mesh": {"pp": pp, "dp": dp, "cp": cp, "tp": tp}, "schemes": schemes},
    }
    return play_job(job)


def sent_by(one: Played, family: str, device: int = 0) -> float:
    """Bytes that a rank of a device sends for one family of schemes."""
    ops = [op for _, op in one.instances(device) if op.stream.partition("-")[0] == family]
    return sent_bytes([op for op in ops if isinstance(op.work, Collective)], one.plan.mesh)


def divided(one: Played) -> tuple[float, float]:
    """Elements of the weights of a rank that tensor ranks shard, and of those that each rank holds whole."""
    held = [param for device in range(one.plan.shape.p) for param in one.list_held(device)]
    cut = sum(param.size for param in held if param.size < param.total)
    return cut, sum(param.size for param in held) - cut


@given(tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(2, 8), m=st.integers(1, 4))
def test_sharded_weights_of_tensor_parallel_layers_move_fewer_bytes(tp: int, dp: int, m: int) -> None:
    """3 (dp-1)/dp M/tp of a rank and micro-batch, where M counts bf16 weights twice and fp32 gradients once; norms are
    whole on every tensor rank."""
    one = played(dp=dp, tp=tp, m=m)
    cut, whole = divided(one)
    assert cut * tp + whole == one.plan.job.model.parameters
    assert sent_by(one, "data") == pytest.approx(m * (dp - 1) / dp * (2 * 2 + 4) * (cut + whole))


@given(
    tp=st.sampled_from([2, 4]), dp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2]), cp=st.sampled_from([1, 2])
)
def test_tensor_traffic_of_a_micro_batch_is_that_of_its_tokens(tp: int, dp: int, pp: int, cp: int) -> None:
    """Replicas change nothing, stages and sequence ranks divide it; all but the table's and the loss's at the ends, and
    the sums of norm gradients."""

    def layers(one: Played) -> float:
        ops = [op for _, op in one.instances() if op.stream == "tensor" and op.phase != "U"]
        inside = [op for op in ops if not any(word in op.name for word in ("embed", "placed", "loss", "norm.out"))]
        return sent_bytes([op for op in inside if isinstance(op.work, Collective)], one.plan.mesh)

    alone, many = played(tp=tp), played(pp, dp, cp, tp)
    assert layers(many) * cp == pytest.approx(layers(alone))
