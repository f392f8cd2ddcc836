"""BurstAttention: traffic beside a ring of keys, two levels of rings, overlap, kernels and masks that it needs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Attention, Collective, UnitRun
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.checked import layer_problems
from meshcast.validation.contract.measure import lowered_stage, make, sent_bytes, waits_for
from meshcast.validation.contract.of_sequence import of_family
from tests.simulator.schemes.ring_layers import LLAMA

MIB = 2**20


def under(use: str, *sizes: int, **model: Any) -> tuple[UnitRun, Mesh]:
    """A layer under one scheme, once over each of several axes, the outermost first."""
    mesh = Mesh({f"x{i}": size for i, size in enumerate(sizes)})
    shape = Model(**({"layers": 1, "hidden": 192, "heads": 24, "vocab": 64, "seq": 48} | model))
    (unit_run,) = lowered_stage(shape, mesh, [make(use, mesh, (axis,)) for axis in mesh.axes]).unit_runs
    return unit_run, mesh


def sent_by(use: str, *sizes: int, **model: Any) -> tuple[float, float]:
    """Bytes that a rank sends forward and backward."""
    unit_run, mesh = under(use, *sizes, **model)
    return sent_bytes(of_family(unit_run.fragment.forward), mesh), sent_bytes(
        of_family(unit_run.fragment.backward), mesh
    )


def test_a_layer_of_llama_3_8b_sends_more_than_a_ring_of_its_few_keys() -> None:
    """Queries and gradients of outputs 7 hops of 8 MiB, those of queries 8, and two values a row 7 hops of 1/8 MiB."""
    assert sent_by("sequence/burst-attention", 8, **LLAMA) == (28 * MIB, (2 * 7 * 8 + 8 * 8 + 2 * 7 / 8) * MIB)
    assert sent_by("sequence/ring", 8, **LLAMA) == (28 * MIB, 56 * MIB)


def test_with_as_many_heads_of_keys_a_ring_of_keys_sends_more() -> None:
    model = {**LLAMA, "kv_heads": 32}
    burst, ring = (sent_by(f"sequence/{name}", 64, **model)[1] for name in ("burst-attention", "ring"))
    assert burst / ring == pytest.approx((1 + 63 / 64 * (2 + 4 / 128)) / (4 * 63 / 64))


def test_projections_in_8_bits_behind_the_attention_make_it_no_longer() -> None:
    """The gradient of its output is then kept under the name of the 8-bit copy."""
    model = {"layers": 2, "hidden": 8192, "heads": 64, "vocab": 1024, "seq": 32768}
    job = {"model": model, "cluster": "dgx-h100:1", "plan": {"cp": 8, "cp_scheme": "burst-attention"}}
    wide, narrow = (simulate({**job, "precision": one, "batch": {"global": 1}}) for one in ("bf16", "fp8-delayed"))
    assert narrow.step_time < wide.step_time and narrow.peak_allocated < wide.peak_allocated


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3)])
def test_two_levels_compute_every_block_once(sizes: tuple[int, int]) -> None:
    """Far ranks exchange shards while near ranks pass theirs on: the gradients of queries come home at both levels."""
    mesh = Mesh({"far": sizes[0], "near": sizes[1]})

    def schemes() -> list[Scheme]:
        return [make("sequence/burst-attention", mesh, (axis,)) for axis in mesh.axes]

    assert layer_problems(mesh, schemes) == []
    assert layer_problems(mesh, partial(sorted, schemes(), key=lambda scheme: scheme.axes)) == []
    forward = [sent_by("sequence/burst-attention", *some)[0] for some in (sizes, (sizes[0] * sizes[1],))]
    assert forward[0] == forward[1]


def test_transfers_of_the_next_block_wait_for_no_block() -> None:
    """In the backward pass too, but for the gradients that travel with them one step behind."""
    unit_run, _ = under("sequence/burst-attention", 4)
    hops = [op for op in unit_run.fragment.backward if isinstance(op.work, Collective)]
    kernels = [op for op in unit_run.fragment.backward if isinstance(op.work, Attention)]
    assert (len(hops), len(kernels)) == (5, 4)
    for b, (hop, kernel) in enumerate(zip(hops, kernels, strict=False)):
        assert kernel not in waits_for(hop) and (not b or {hops[b - 1], kernels[b - 1]} <= waits_for(hop))
    assert {*kernels} <= waits_for(hops[-1])


@pytest.mark.parametrize("use", ["burst-attention", "ring"])
def test_bidirectional_attention_is_twice_the_work_of_causal(use: str) -> None:
    works = [
        sum(op.work.flops for op in unit_run.fragment.forward if isinstance(op.work, Attention))
        for unit_run, _ in (under(f"sequence/{use}", 4, bidirectional=some) for some in (True, False))
    ]
    assert works[0] == 2 * works[1] == 4 * 48 * 48 * 192 / 4
