"""Units of several layers: weights gathered and gradients scattered at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.validation.contract.played import play_job
from tests.simulator.schemes.small_jobs import GPT, job_on, moved
from tests.strategies import examples


def job(unit: int, pipeline: str = "pipeline/1f1b", layers: int = 7, **more: Any) -> dict[str, Any]:
    """Layers on four sharded ranks of two tensor ranks each."""
    schemes = [
        {"use": pipeline, "over": "pp"},
        {"use": "data/fsdp", "over": "dp", "unit": unit, **more.pop("options", {})},
        {"use": "tensor/megatron-sp", "over": "tp"},
        *({"use": use} for use in more.pop("memory", ())),
    ]
    model = {**GPT, "seq": 32, "layers": layers, **more.pop("model", {})}
    return job_on({"pp": 1, "dp": 4, "tp": 2}, *schemes, samples=16, model=model)


@examples(50)
@given(
    unit=st.integers(2, 8),
    layers=st.integers(1, 8),
    pipeline=st.sampled_from(["pipeline/1f1b", "pipeline/zb-h1"]),
    memory=st.sampled_from([(), ("memory/recompute-full",), ("memory/recompute-selective",), ("memory/offload",)]),
    prefetch=st.sampled_from([0, 1, 2]),
)
def test_they_move_as_much_in_fewer_messages(
    unit: int, layers: int, pipeline: str, memory: tuple[str, ...], prefetch: int
) -> None:
    more = {"memory": memory, "options": {"prefetch": prefetch}}
    alone, played = (play_job(job(n, pipeline, layers, **more)) for n in (1, unit))
    for operation, turns in (("all_gather", 2), ("reduce_scatter", 1)):
        one, several = moved(alone, operation), moved(played, operation)
        assert sum(one) == sum(several)
        # The embedding, the ending and the layers; of those whose activations are copied the last one is another kind.
        units = 2 + layers // unit + (layers % unit > 0)
        assert len(several) == 4 * turns * units or "memory/offload" in memory
        assert len(several) <= len(one)
    assert played.flops("F") == alone.flops("F") and played.flops("B", "W") == alone.flops("B", "W")
    assert [peak.left for peak in played.peaks] == [0]
    assert sum(param.size for param in played.list_held(0)) == sum(param.size for param in alone.list_held(0))


@pytest.mark.parametrize("unit", [1, 2, 3])
def test_two_units_are_whole_at_a_time(unit: int) -> None:
    """Of equal layers, where the ends are small."""
    sizes = {"hidden": 256, "vocab": 8}
    played = play_job(job(unit, layers=6, model=sizes))
    layer = next(unit_run for unit_run in played.stage_ops(0).unit_runs if unit_run.name == "layer")
    each = 2 * sum(param.size for param in layer.fragment.params) / unit
    assert played.category_peak(0, "parameters") == pytest.approx(2 * unit * each, rel=0.01)


@pytest.mark.parametrize("batches", [1, 3])
def test_two_buffers_stay_through_the_passes(batches: int) -> None:
    """Where no layer is whole, in the embedding, they take their memory all the same; no message changes."""
    model = {**GPT, "layers": 6, "hidden": 64, "vocab": 8}
    plain, buffered = (
        play_job(job_on({"dp": 2}, {"use": "data/fsdp", "over": "dp", **options}, samples=2 * batches, model=model))
        for options in ({}, {"double_buffer": True})
    )
    layer = next(unit_run for unit_run in plain.stage_ops(0).unit_runs if unit_run.name == "layer")
    elements = sum(param.size for param in layer.fragment.params)
    for operation in ("all_gather", "reduce_scatter"):
        assert moved(plain, operation) == moved(buffered, operation)
    stage_ops = buffered.stage_ops(0)
    assert (stage_ops.whole_weights, stage_ops.whole_gradients) == (2 * 2 * elements, 2 * 4 * elements)
    kept = [use for unit_run in stage_ops.unit_runs for use in unit_run.fragment.tensor_uses]
    assert not [use for use in kept if use.key.startswith("weights ") and use.nbytes == 2 * elements]
    assert [peak.left for peak in buffered.peaks] == [peak.left for peak in plain.peaks]
    least = 2 * 2 * elements
    assert buffered.category_peak(0, "parameters") >= max(least, plain.category_peak(0, "parameters") * 0.99)
    assert [op.name for _, op in plain.instances()] == [op.name for _, op in buffered.instances()]
