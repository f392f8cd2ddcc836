"""1F1B and interleaved 1F1B whose forward and backward passes run together (Megatron-Core's combined 1F1B)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.scheduling.schedule import OverlappedPasses, PipelineSetting, PipelineShape, actions_of
from tests.simulator.scheduling.schedules import make_schedule

PLAIN, INTERLEAVED = "1f1b", "interleaved-1f1b"
SHAPES = st.builds(PipelineShape, st.integers(1, 4), st.integers(1, 3), st.integers(2, 3))


@given(rounds=SHAPES, interleaved=st.booleans())
def test_every_pass_runs_once_and_turns_run_together_after_one_more_warm_up(
    rounds: PipelineShape, interleaved: bool
) -> None:
    use, chunks = (INTERLEAVED, rounds.v) if interleaved else (PLAIN, 1)
    shape = PipelineShape(rounds.p, rounds.p * rounds.m, chunks)
    alone, overlapped = (make_schedule(use, chunks=chunks, overlap_passes=overlap) for overlap in (False, True))
    forms = {form.quantity: form.value for form in overlapped.closed_forms(PipelineSetting(shape, 1.0, 1.0, 1.0))}
    assert "bubble" not in forms
    for device in range(shape.p):
        plain, joined = (list(schedule.order(shape, device)) for schedule in (alone, overlapped))
        assert sorted(actions_of(joined)) == sorted(plain)
        for kind in ("F", "BW"):
            assert [a for a in actions_of(joined) if a.kind == kind] == [a for a in plain if a.kind == kind]
        warmup = next((i for i, action in enumerate(plain) if action.kind == "BW"), len(plain)) - 1
        pairs = [turn for turn in joined if isinstance(turn, OverlappedPasses)]
        assert len(pairs) == max(0, shape.m * shape.v - warmup - 1)
        assert all(pair.forward[:3:2] != pair.backward[:3:2] for pair in pairs), "a pass needs no pass of its own pair"
        held = most = 0
        for item in joined:
            held += sum(a.kind == "F" for a in actions_of([item]))
            most = max(most, held)
            held -= sum(a.kind == "BW" for a in actions_of([item]))
        assert most == forms["in_flight_b"][device]


def job(use: str, overlap: bool, pp: int = 2, m: int = 8) -> dict[str, Any]:
    chunks = 2 if use == INTERLEAVED else 1
    return {
        "model": {
            "layers": 8, "hidden": 2048, "heads": 16, "vocab": 8192, "seq": 4096, "tied": False, "gated": True,
            "moe": {"experts": 32, "top_k": 8, "expert_ffn": 768},
        },
        "cluster": "dgx-h100:2",
        "framework": {"name": "megatron-core", "set": {"cuda_graphs": True}},
        "batch": {"global": m * 16 // pp, "micro": 1, "sequence": 4096},
        "plan": {
            "mesh": {"pp": pp, "dp": 16 // pp},
            "views": {"experts": {"edp": 1, "ep": 16 // pp}},
            "schemes": [
                {"use": f"pipeline/{use}", "over": "pp", "chunks": chunks, "overlap_passes": overlap},
                {"use": "data/zero-1", "over": "dp"},
                {"use": "expert/all-to-all", "over": "ep"},
            ],
        },
    }  # fmt: skip


@pytest.mark.parametrize(("use", "pp"), [(PLAIN, 1), (PLAIN, 4), (INTERLEAVED, 2)])
def test_token_dispatch_of_one_pass_is_hidden_by_the_other(use: str, pp: int) -> None:
    plain, overlapped = (simulate(job(use, overlap, pp)) for overlap in (False, True))
    assert overlapped.breakdown.parts["ep"] < 0.6 * plain.breakdown.parts["ep"]
    if pp == 1:
        # In a pipeline the longer warm-up costs a bubble.
        assert overlapped.step_time < 0.9 * plain.step_time
    for kind in ("gemm", "attention"):
        assert plain.breakdown.parts[kind] == pytest.approx(overlapped.breakdown.parts[kind])
    held = [max(peak.by["activations"] for peak in report.play.peaks) for report in (plain, overlapped)]
    assert held[1] > held[0]
