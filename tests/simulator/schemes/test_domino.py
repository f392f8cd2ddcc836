"""Domino: two halves of a micro-batch in turn, segment by segment, and what that hides."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import COMPUTE, Collective, Gemm, Memory, Op
from meshcast.validation.contract.of_tensor import LoweredLayer

HALVES = (("tensor/domino", ()),)


def layer(more: Any = ()) -> tuple[list[Op], list[Op]]:
    (run, _) = LoweredLayer(4, 2, 64, 128, 8, more=more).layer("tensor/megatron")
    return run.fragment.forward, run.fragment.backward


def totals(ops: list[Op]) -> tuple[float, float, float]:
    """FLOPs, bytes of memory, bytes sent."""
    sent = [op.work.nbytes for op in ops if isinstance(op.work, Collective)]
    kernels = [op.work for op in ops if isinstance(op.work, Gemm | Memory)]
    return sum(work.flops for work in kernels), sum(work.bytes for work in kernels), sum(sent)


def test_halves_do_what_the_whole_does() -> None:
    for whole, halves in zip(layer(), layer(HALVES), strict=True):
        one, other = totals(whole), totals(halves)
        assert len(halves) == 2 * len(whole)
        assert (other[0], other[2]) == (pytest.approx(one[0]), one[2])
        assert other[1] > one[1], "weights are read twice"


def test_a_segment_runs_for_one_half_and_then_for_the_other() -> None:
    forward, backward = layer(HALVES)
    names = [op.name for op in forward if op.name.partition(" ")[0] in ("qkv", "proj", "up", "down", "all_reduce")]
    attention = [f"{name} {i}" for i in (0, 1) for name in ("qkv", "proj", "all_reduce proj")]
    mlp = [f"{name} {i}" for i in (0, 1) for name in ("up", "down", "all_reduce down")]
    assert names == attention + mlp
    at = {op.name: i for i, op in enumerate(backward)}
    assert at["all_reduce dnorm2 0"] < at["wup 0"] < at["dup 1"] < at["all_reduce dnorm2 1"] < at["dnorm2 0"]


def test_kernels_wait_for_their_own_half_alone() -> None:
    forward, _ = layer(HALVES)
    for op in forward:
        left, seen = list(op.after), set[Op]()
        while left:
            one = left.pop()
            seen.add(one)
            left += [] if one.work is not None else one.after
        assert not any(one.work is not None and one.name[-1] != op.name[-1] for one in seen)
    assert {op.stream for op in forward} == {COMPUTE, "tensor"}


def job(micro: int, *more: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "llama2-13b",
        "cluster": "dgx-h100:1",
        "framework": {"name": "megatron-core", "set": {"cuda_graphs": True}},
        "batch": {"global": 16, "micro": micro, "sequence": 1024},
        "plan": {"mesh": {"tp": 8}, "schemes": [*more, {"use": "tensor/megatron", "over": "tp"}]},
    }


def test_all_reduces_hide_behind_the_other_half() -> None:
    plain, halves = (simulate(job(16, *more)) for more in ((), ({"use": "tensor/domino"},)))
    exposed = [one.to_dict()["breakdown_s"]["exposed"]["tp"] for one in (plain, halves)]
    assert exposed[1] < 0.3 * exposed[0]
    assert plain.step_time / 1.3 < halves.step_time < plain.step_time
