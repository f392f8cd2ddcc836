"""Weight gradients that Megatron-Core puts off: of the output layer to the end, of layers behind their inputs'."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.program.program import one_of
from meshcast.simulator.scheduling.schedule import PipelineShape
from meshcast.validation.contract.played import PAID, Played, play_job
from tests.simulator.scheduling.schedules import job, make_schedule
from tests.simulator.scheduling.test_overlapped_passes import job as job_with_experts


@given(p=st.integers(2, 5), rounds=st.integers(1, 4), chunks=st.integers(1, 3), limit=st.integers(0, 30))
def test_output_gradients_run_behind_all_passes_of_the_last_stage(p: int, rounds: int, chunks: int, limit: int) -> None:
    shape, use = PipelineShape(p, p * rounds, chunks), "interleaved-1f1b" if chunks > 1 else "1f1b"
    plain, deferring = (
        make_schedule(use, chunks=chunks, **options) for options in ({}, {"deferred_output_gradients": limit})
    )
    for device in range(p):
        usual, order = (list(schedule.order(shape, device)) for schedule in (plain, deferring))
        count = min(limit or shape.m, shape.m) if device == p - 1 else 0
        last = [action for action in usual if action.kind == "BW" and action.stage == shape.stages - 1]
        assert order[len(usual) :] == [action._replace(kind="W") for action in last[:count]]
        halves = {action: action._replace(kind="B") for action in last[:count]}
        assert order[: len(usual)] == [halves.get(action, action) for action in usual]


def deferring(limit: int | None, tp: int = 2, **more: Any) -> Played:
    options = {} if limit is None else {"deferred_output_gradients": limit}
    described = job("1f1b", 2, 8, tp=tp, model={"hidden": 64, "vocab": 4096}, **more)
    described["plan"]["schedule"] = {"use": "1f1b", **options}
    return play_job(described, PAID)


@pytest.mark.parametrize(("limit", "held"), [(0, 7), (3, 3), (8, 7)])
def test_deferred_output_gradients_take_memory_and_leave_the_passes(limit: int, held: int) -> None:
    """Of a deferred micro-batch stay the gradient of the logits and this rank's share of the input, which is gathered
    again behind all passes. The last of all passes has these anyhow."""
    plain, put_off = deferring(None), deferring(limit)
    assert put_off.flops("B", "W") == pytest.approx(plain.flops("B", "W"))
    assert put_off.step.span < plain.step.span
    first, last = ([played.peaks[device] for played in (plain, put_off)] for device in (0, 1))
    assert first[0].by == first[1].by
    tokens, logits, inputs = 32, 4096 // 2 * 2, 64 // 2 * 2
    assert last[1].by["logits"] - last[0].by["logits"] == pytest.approx(held * tokens * logits)
    assert last[1].by["activations"] - last[0].by["activations"] >= (held - 1) * tokens * inputs
    assert all(peak.left == 0 for peak in put_off.peaks)


def backward_ops(delay: bool, **more: Any) -> tuple[Played, list[Any]]:
    described = job_with_experts("1f1b", True, 1, 2)
    described["model"]["moe"]["shared_experts"] = 1
    described["plan"]["schemes"][0]["delay_weight_gradients"] = delay
    described["framework"]["set"].update(more)
    played = play_job(described, PAID)
    return played, next(run.fragment.backward for run in one_of(played.stages[0]).unit_runs if run.name == "layer")


@pytest.mark.parametrize("overlap", [True, False])
def test_delayed_weight_gradients_run_beside_the_exchange_and_at_the_end(overlap: bool) -> None:
    (plain, usual), (put_off, ops) = (backward_ops(delay, overlap={"ep": overlap}) for delay in (False, True))
    assert Counter((op.name, op.work) for op in ops) == Counter((op.name, op.work) for op in usual)
    place = {op: at for at, op in enumerate(ops)}
    assert all(place.get(other, -1) < at for op, at in place.items() for other in op.after)
    names = [op.name for op in ops]
    dispatch = max(at for at, op in enumerate(ops) if op.stream == "expert" and isinstance(op.work, Collective))
    assert names[dispatch - 2 : dispatch] == ["wexpert.down", "wexpert.up"]
    assert not {other.phase for other in ops[dispatch].after} & {"W"}
    assert names[-4:] == ["wshared.down", "wshared.up", "wproj", "wqkv"]
    assert names.index("wrouter") == names.index("drouter") + 1, "a router is no linear layer of Transformer Engine"
    assert put_off.flops("B", "W") == pytest.approx(plain.flops("B", "W"))
    assert put_off.step.span <= plain.step.span * (1 + 1e-9)
    assert put_off.peaks[0].total >= plain.peaks[0].total
