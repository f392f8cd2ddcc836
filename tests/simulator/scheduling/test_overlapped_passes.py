"""1F1B and interleaved 1F1B whose forward and backward passes run together (Megatron-Core's combined 1F1B)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.scheduling.schedule import OverlappedPasses, PipelineSetting, PipelineShape, actions_of

PLAIN, INTERLEAVED = "pipeline/1f1b", "pipeline/interleaved-1f1b"
SHAPES = st.builds(PipelineShape, st.integers(1, 4), st.integers(1, 3), st.integers(2, 3))


def orders(use: str, shape: PipelineShape, overlap: bool) -> list[list[Any]]:
    kind = find_scheme(use)
    schedule: Any = kind(("pp",), kind.Options(chunks=shape.v, overlap_passes=overlap))
    return [list(schedule.order(shape, device)) for device in range(shape.p)]


@given(rounds=SHAPES, interleaved=st.booleans())
def test_every_pass_runs_once_and_turns_run_together_after_one_more_warm_up(
    rounds: PipelineShape, interleaved: bool
) -> None:
    use, chunks = (INTERLEAVED, rounds.v) if interleaved else (PLAIN, 1)
    shape = PipelineShape(rounds.p, rounds.p * rounds.m, chunks)
    for device, (plain, joined) in enumerate(zip(*(orders(use, shape, o) for o in (False, True)), strict=True)):
        assert sorted(actions_of(joined)) == sorted(plain)
        for kind in ("F", "BW"):
            assert [a for a in actions_of(joined) if a.kind == kind] == [a for a in plain if a.kind == kind]
        warmup = next((i for i, one in enumerate(plain) if one.kind == "BW"), len(plain)) - 1
        total = shape.m * shape.v
        pairs = [one for one in joined if isinstance(one, OverlappedPasses)]
        assert len(pairs) == max(0, total - warmup - 1)
        assert all(one.forward[:3:2] != one.backward[:3:2] for one in pairs), "a pass needs no pass of its own pair"
        held = most = 0
        for item in joined:
            held += sum(a.kind == "F" for a in actions_of([item]))
            most = max(most, held)
            held -= sum(a.kind == "BW" for a in actions_of([item]))
        kind = find_scheme(use)
        schedule: Any = kind(("pp",), kind.Options(chunks=shape.v, overlap_passes=True))
        forms = {one.quantity: one.value for one in schedule.closed_forms(PipelineSetting(shape, 1.0, 1.0, 1.0))}
        assert most == forms["in_flight_b"][device]
        assert "bubble" not in forms


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
                {"use": use, "over": "pp", "chunks": chunks, "overlap_passes": overlap},
                {"use": "data/zero-1", "over": "dp"},
                {"use": "expert/all-to-all", "over": "ep"},
            ],
        },
    }  # fmt: skip


@pytest.mark.parametrize(("use", "pp"), [(PLAIN, 1), (PLAIN, 4), (INTERLEAVED, 2)])
def test_token_dispatch_of_one_pass_is_hidden_by_the_other(use: str, pp: int) -> None:
    plain, overlapped = (simulate(job(use, one, pp)) for one in (False, True))
    assert overlapped.breakdown.parts["ep"] < 0.6 * plain.breakdown.parts["ep"]
    if pp == 1:
        # In a pipeline the longer warm-up costs a bubble.
        assert overlapped.step_time < 0.9 * plain.step_time
    compute = [sum(one.breakdown.parts[kind] for kind in ("gemm", "attention")) for one in (plain, overlapped)]
    assert compute[0] == pytest.approx(compute[1])
    held = [
        max(stage["by"]["activations"] for stage in one.to_dict()["memory"]["stages"]) for one in (plain, overlapped)
    ]
    assert held[1] > held[0]


@pytest.mark.parametrize(("use", "pp", "m"), [(PLAIN, 1, 3), (PLAIN, 4, 2), (PLAIN, 4, 8), (INTERLEAVED, 2, 2)])
def test_engines_agree(use: str, pp: int, m: int) -> None:
    steps = [simulate(job(use, True, pp, m), engine=engine).step_time for engine in ("matrices", "simpy", "sweep")]
    assert steps[1:] == pytest.approx([steps[0]] * 2, rel=1e-9)
