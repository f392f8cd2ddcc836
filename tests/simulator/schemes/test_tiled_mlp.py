"""TiledMLP: work that is done again, what is in memory for a tile at a time, and when gradients are complete."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.ops import Gemm, StageOps
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn_grid

HIDDEN, FFN, TOKENS, LAYERS = 64, 256, 2 * 64, 3
USE = "memory/tiled-mlp"
FORWARD = 2 * 3 * TOKENS * HIDDEN * FFN * LAYERS
"""FLOPs of the gated MLPs of a forward pass."""


def job(tiles: int | None, *schemes: str, tp: int = 1, model: Any = None, **traits: Any) -> dict[str, Any]:
    """A small Llama whose MLPs run in tiles; None: in one piece. schemes: further ones, outside of it."""
    shape = {"layers": LAYERS, "hidden": HIDDEN, "heads": 2, "ffn": FFN, "gated": True, "vocab": 128, "seq": 64}
    used = [{"use": "data/fsdp", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}]
    used += [{"use": use} for use in schemes]
    used += [{"use": USE, "tiles": tiles}] if tiles else []
    plan = {"mesh": {"dp": 2, "tp": tp}, "schemes": used}
    cluster = {"gpu": "h100-sxm", "gpus": 2 * tp}
    framework = {"name": "torchtitan", "set": {"launch_s": 0.0, "step_overhead_s": 0.0, **traits}}
    batch = {"global": 4, "micro": 2}
    return {
        "model": {**shape, **(model or {})},
        "cluster": cluster,
        "batch": batch,
        "plan": plan,
        "framework": framework,
    }


def products(found: Played, phase: str) -> float:
    """FLOPs of matrix products of a phase on a device."""
    works = [op.work for _, op in found.instances(0) if op.phase == phase]
    return sum(work.flops for work in works if isinstance(work, Gemm))


def inside_peak(stage_ops: StageOps) -> int:
    """Most bytes that the tensors inside an MLP, and no others, take at once in the backward pass of a layer."""
    fragment = next(unit_run.fragment for unit_run in stage_ops.unit_runs if unit_run.name == "layer")
    names = ("gate@", "up@", "act@", "d:gate@", "d:up@", "d:act@")
    place = {op: i for i, op in enumerate(fragment.backward)}
    spans: dict[str, list[int]] = {}
    sizes = {}
    for use in fragment.tensor_uses:
        if use.key.startswith(names) and use.op in place:
            spans.setdefault(use.key, []).append(place[use.op])
            sizes[use.key] = use.nbytes
    return max(
        sum(sizes[key] for key, ends in spans.items() if min(ends) <= at <= max(ends)) for at in range(len(place))
    )


@pytest.mark.parametrize(("tiles", "tp"), drawn_grid([1, 2, 8], [1, 2]))
def test_mlps_run_forward_twice(tiles: int, tp: int) -> None:
    whole, tiled = play_job(job(None, tp=tp)), play_job(job(tiles, tp=tp))
    assert products(tiled, "R") == pytest.approx(FORWARD / tp)
    for phase in "FBW":
        assert products(tiled, phase) == pytest.approx(products(whole, phase))
    assert [peak.left for peak in tiled.peaks] == [peak.left for peak in whole.peaks]


def test_with_recomputed_layers_they_run_thrice() -> None:
    """Autograd saves the input of an MLP behind its forward pass, so that no recomputation stops before."""
    layers = play_job(job(None, "memory/recompute-full", recompute_early_stop=False))
    both = play_job(job(4, "memory/recompute-full", recompute_early_stop=True))
    assert products(both, "R") == pytest.approx(products(layers, "R") + FORWARD)


@pytest.mark.parametrize("tiles", [2, 4])
def test_what_is_inside_is_there_for_a_tile_at_a_time(tiles: int) -> None:
    single, tiled = (inside_peak(play_job(job(n)).stage_ops(0)) for n in (1, tiles))
    assert tiled == single / tiles


def test_gradients_are_reduced_behind_all_tiles() -> None:
    """As many reductions as without tiles."""
    found, whole = play_job(job(4)), play_job(job(None))
    sums = [[op for _, op in played.instances(0) if op.name == "reduce grads"] for played in (found, whole)]
    assert len(sums[0]) == len(sums[1]) > 0
    flat = found.flat
    waited = [
        {flat.ops[other].name.rpartition(" tile ")[2] for other in flat.after[n] if " tile " in flat.ops[other].name}
        for n, op in found.instances(0)
        if op.name in ("pack grads", "reduce grads")
    ]
    assert [tiles for tiles in waited if tiles] == [{"0", "1", "2", "3"}] * LAYERS


def test_experts_run_in_tiles() -> None:
    experts = {"moe": {"experts": 4, "top_k": 2, "expert_ffn": FFN}}
    whole, tiled = play_job(job(None, model=experts)), play_job(job(4, model=experts))
    assert products(tiled, "F") == pytest.approx(products(whole, "F"))
    assert products(tiled, "R") > 0 and [p.left for p in tiled.peaks] == [p.left for p in whole.peaks]
