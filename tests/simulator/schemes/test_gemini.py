"""Colossal-AI Gemini: chunks, fractions of the states on the host, and the placement after a warm-up step."""

from typing import Any

import pytest

from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Collective, HostCopy, HostUpdate, Memory
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.report.report import Report

MODEL = {"layers": 4, "hidden": 4096, "heads": 32, "vocab": 32000, "seq": 2048, "tied": False}
CLUSTER = {"gpu": "h100-sxm", "gpus": 8}


def forecast(batch: int = 8, use: str = "data/gemini", engine: Any = "matrices", **options: Any) -> Report:
    plan = {"mesh": {"dp": 8}, "schemes": [{"use": use, "over": "dp", **options}]}
    job = {"model": MODEL, "cluster": CLUSTER, "framework": "colossalai", "plan": plan}
    return simulate({**job, "batch": {"global": batch, "micro": 1}}, engine)


def copied(report: Report, back: bool, phases: str) -> int:
    works = [op.work for op in report.play.step.flat.ops if op.phase in phases]
    return sum(work.nbytes for work in works if isinstance(work, HostCopy) and work.back == back)


@pytest.mark.parametrize(("optimizer", "weights"), [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.25), (1.0, 1.0)])
@pytest.mark.parametrize("batch", [8, 24])
def test_fractions(optimizer: float, weights: float, batch: int) -> None:
    """What a link carries, a (2 f_p + f_o) M/N and f_o (1 - f_p) M/N, and what the GPU and the host hold."""
    report = forecast(batch, offload_optim_frac=optimizer, offload_param_frac=weights)
    shard, passes = 2 * report.job.model.parameters / 8, batch // 8
    assert copied(report, True, "FB") == pytest.approx(2 * passes * weights * shard, rel=1e-6)
    assert copied(report, False, "W") == pytest.approx(passes * optimizer * shard, rel=1e-6)
    assert copied(report, True, "U") == pytest.approx(optimizer * (1 - weights) * shard, rel=1e-6)
    (resting,) = report.play.resting
    kept = sum(resting[state] for state in ("parameters", "gradients", "optimizer"))
    assert kept == pytest.approx((2 * (1 - weights) + 14 * (1 - optimizer)) * shard / 2)
    (away,) = report.play.offloaded_states
    assert away["cpu"] + kept == pytest.approx(16 * shard / 2)


def test_updates_of_both_sides_are_those_of_all_states() -> None:
    def update(share: float) -> int:
        ops = forecast(offload_optim_frac=share).play.program.updates[0].parts[0].block.ops
        works = [op.work for op in ops if op.name.startswith("adam")]
        return sum(work.read + work.write for work in works if isinstance(work, Memory | HostUpdate))

    assert update(0.0) == update(0.3) == update(1.0)


def test_chunks() -> None:
    """A chunk has at least its elements; one of a layer is gathered as the unit of FSDP is."""

    def gathers(report: Report) -> list[int]:
        works = [op.work for op in report.play.step.flat.ops if op.phase == "F"]
        return sorted(work.nbytes for work in works if isinstance(work, Collective) and work.operation == "all_gather")

    small = gathers(forecast(chunk=2**20))
    usual = gathers(forecast())
    large = gathers(forecast(chunk=2**30))
    assert sum(small) == sum(usual) == sum(large) and len(small) > len(usual) > len(large) == 6
    assert large == gathers(forecast(use="data/fsdp"))


def test_auto_placement() -> None:
    """All optimizer states go to the host; with a margin what fits stays, and weights leave only a GPU that is full."""
    report, margin = forecast(placement="auto"), forecast(placement="auto", gpu_margin=1.0)
    placed, kept = (one.play.plan.schemes[0].options for one in (report, margin))
    assert (placed.offload_optim_frac, placed.offload_param_frac) == (1.0, 0.0)
    assert (kept.offload_optim_frac, kept.offload_param_frac) == (0.0, 0.0)
    assert margin.step_time == forecast().step_time and report.step_time == forecast(offload_optim_frac=1.0).step_time


@pytest.mark.parametrize(("room", "optimizer", "weights"), [(0.5, 1.0, 0.5), (0.0, 1.0, 1.0), (4.0, 0.5, 0.0)])
def test_placement_by_free_memory(room: float, optimizer: float, weights: float) -> None:
    """room: what passes leave free of 0.9 of the memory, over the weights; other states are six times the weights."""
    scheme = find_scheme("data/gemini")(options=find_scheme("data/gemini").Options(placement="auto", gpu_margin=1.0))
    states = {"parameters": 1e9, "gradients": 1e9, "optimizer": 5e9}
    placed = scheme.place_states((5e9 + room * 1e9) / 0.9, 5e9, states).options
    assert (placed.offload_optim_frac, placed.offload_param_frac) == pytest.approx((optimizer, weights))
