"""Models of videos: attention within frames and across frames by turns; its pairs, FLOPs, rules and collectives."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, Gemm, Op
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.flops import CONVENTIONS, forward_matmul_flops
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.measure import forward_ops, lowered_stage, make, sent_bytes

VIDEO = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 64, "seq": 96, "frames": 8}


def attention_works(**model: Any) -> list[Attention]:
    ops = forward_ops(lowered_stage(Model(**{**VIDEO, **model}), Mesh({}), layers=2))
    return [op.work for op in ops if isinstance(op.work, Attention)]


def test_layers_attend_by_turns_within_and_across_frames() -> None:
    within, across = attention_works()
    assert (within.batch, within.q, within.kv, within.share) == (8, 12, 12, 1)
    assert (across.batch, across.q, across.kv, across.share) == (12, 8, 8, 1)


def test_one_frame_is_a_model_of_one_axis() -> None:
    """Within the frame all tokens attend to all; across frames each to itself."""
    within, across = attention_works(frames=1)
    (plain, _) = attention_works(frames=None, bidirectional=True)
    assert within == plain
    assert (across.batch, across.q, across.kv) == (96, 1, 1)


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_flops_are_those_of_the_kernels(attention: str) -> None:
    model = Model(**VIDEO)
    found = lowered_stage(model, Mesh({}), layers=2, attention=attention)
    flops = sum(op.work.flops for op in forward_ops(found) if isinstance(op.work, Attention | Gemm))
    parts = forward_matmul_flops(model, 96, 96, causal=attention == "flash")
    assert flops == sum(parts.values()) - parts["head"]
    assert parts["attention"] == 96 * (2 * 12 + 2 * 8) * 2 * 64


def test_conventions_count_the_tokens_that_attention_runs_over() -> None:
    model = Model(**VIDEO)
    for name in ("palm", "mosaic_mfu"):
        without = 6 * model.active_parameters
        assert CONVENTIONS[name](model, 96) == without + 12 * 64 * (12 + 8)


# ------------------------------------------------------------------------------------------- collectives


def collectives(use: str, ranks: int = 4, **options: Any) -> tuple[list[Op], Mesh]:
    """Those of a forward pass over a pair of layers."""
    mesh = Mesh({"x": ranks})
    found = lowered_stage(Model(**VIDEO), mesh, [make(use, mesh, ("x",), **options)], layers=2)
    return [op for op in forward_ops(found) if isinstance(op.work, Collective)], mesh


def test_only_attention_within_frames_moves_tokens() -> None:
    """Two all-to-alls of one tensor, or four of queries, keys, values and outputs; in a ring of four ranks, three hops
    of keys and values."""
    tensor = 96 * 64 * 2 / 4
    for use, wanted in (("dsp", 2 * 3 / 4), ("ulysses", 4 * 3 / 4), ("ring", 2 * 3), ("all-gather", 2 * 3)):
        options = {"balance": "contiguous"} if use == "ring" else {}
        ops, mesh = collectives(f"sequence/{use}", **options)
        assert sent_bytes(ops, mesh) == pytest.approx(wanted * tensor), use


def test_attention_is_whole_in_both_layers() -> None:
    mesh = Mesh({"x": 4})
    found = lowered_stage(Model(**VIDEO), mesh, [make("sequence/dsp", mesh, ("x",))], layers=2)
    within, across = (op.work for op in forward_ops(found) if isinstance(op.work, Attention))
    assert (within.batch, within.q, within.heads) == (2, 12, 8)
    assert (across.batch, across.q, across.heads) == (3, 8, 8)


def test_an_architecture_has_a_unit_of_each_kind() -> None:
    stage = Architecture(Model(**{**VIDEO, "layers": 4}), 1, 96, 64).stage(range(4), True, True)
    layers = [unit for unit in stage.units if unit.name == "layer"]
    assert [unit.count for unit in layers] == [1, 1, 1, 1]
    assert layers[0] is not layers[1] and layers[0].children == layers[2].children
