"""Tutel's switchable parallelism: ranks that share experts gather tokens or weights, with the same weights at rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator import Report, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Collective, Fragment
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.program import one_of
from tests.simulator.schemes.small_jobs import job_on

EP, R, H, F = 2, 4, 1024, 4096
SHARED = SharedWork()


def job(parallelism: str, tokens: int, routing: Any = "balanced") -> dict[str, Any]:
    """One layer of two experts over eight ranks, four for each of them."""
    moe = {"experts": EP, "top_k": 1, "expert_ffn": F}
    expert = {"use": "expert/tutel", "over": ["ep", "etp"], "parallelism": parallelism, "degree": 1}
    model = {"layers": 1, "hidden": H, "heads": 16, "vocab": 1024, "seq": tokens, "moe": moe}
    schemes = {"use": "data/zero-1", "over": "dp"}, {**expert, "routing": routing}
    more = {"cluster": "dgx-a100:1", "framework": {"set": {"launch_s": 0.0, "step_overhead_s": 0.0}}}
    views = {"experts": {"edp": 1, "ep": EP, "etp": R}}
    return job_on({"dp": EP * R}, *schemes, samples=EP * R, model=model, views=views, **more)


def forecast(*given: Any) -> Report:
    return simulate(job(*given), shared_work=SHARED)


def layer(parallelism: str, tokens: int) -> Fragment:
    (stage,) = lower_stages(resolve_plan(load_job(job(parallelism, tokens)), SHARED))[0]
    return next(unit_run.fragment for unit_run in one_of(stage).unit_runs if unit_run.name == "layer")


def received_in_sharing_group(fragment: Fragment) -> float:
    """Bytes that a rank receives from those that share its experts, in all-gathers and reduce-scatters, forward."""
    works = [op.work for op in fragment.forward if isinstance(op.work, Collective)]
    inside = [work for work in works if work.operation in ("all_gather", "reduce_scatter")]
    return sum(work.nbytes * (R - 1) / R for work in inside)


@pytest.mark.parametrize("tokens", [256, 8192])
def test_ranks_that_share_an_expert_receive_tokens_or_weights(tokens: int) -> None:
    """2 (R - 1) S h b or (R - 1)/R W b, with biases of the first matrix: those of the second are whole."""
    assert received_in_sharing_group(layer("model", tokens)) == 2 * (R - 1) * tokens * H * 2
    assert received_in_sharing_group(layer("data", tokens)) == (R - 1) / R * (2 * H * F + F) * 2


def test_parameters_rest_alike() -> None:
    """So that switching moves nothing: a rank holds the same shards of the matrices."""
    sizes = [
        {param.name: param.size for param in layer(way, 256).params if param.name.startswith("wexpert")}
        for way in ("model", "data")
    ]
    assert sizes[0] == sizes[1] == {"wexpert.up": H * F // R, "wexpert.down": H * F // R}


def test_auto_takes_the_faster_one() -> None:
    chosen = []
    for tokens in (256, 16384):
        times = {way: forecast(way, tokens).step_time for way in ("model", "data")}
        auto = forecast("auto", tokens)
        assert auto.step_time == min(times.values())
        chosen.append(min(times, key=lambda way: times[way]))
        assert any(f"parallelism = {chosen[-1]}" in sentence for sentence in auto.assumed)
    assert chosen == ["model", "data"]


def test_each_step_takes_the_faster_one_for_its_loads(tmp_path: Path) -> None:
    """Skewed loads need a larger capacity: then weights travel instead of the slots. No step takes longer than under
    the better of both, and the mean is less than that of either."""
    trace = tmp_path / "trace.csv"
    trace.write_text("1,1\n100,1\n1,1\n1,100\n")
    by_way = {way: forecast(way, 512, {"trace": str(trace)}) for way in ("model", "data", "auto")}
    times = {way: report.times_of_step_kinds for way, report in by_way.items()}
    assert times["auto"] == [min(pair) for pair in zip(times["model"], times["data"], strict=True)]
    assert by_way["auto"].step_time < min(by_way["model"].step_time, by_way["data"].step_time)


def exchanging(tokens: int, nodes: int, **options: Any) -> Report:
    """One layer whose experts are all on ranks of their own, on nodes of eight GPUs."""
    ranks = 8 * nodes
    moe = {"experts": ranks, "top_k": 1, "expert_ffn": F}
    expert = {"use": "expert/tutel", "over": "ep", **options}
    model = {"layers": 1, "hidden": H, "heads": 16, "vocab": 1024, "seq": tokens, "moe": moe}
    schemes = {"use": "data/zero-1", "over": "dp"}, expert
    more = {"cluster": f"dgx-a100:{nodes}", "framework": {"set": {"launch_s": 0.0, "step_overhead_s": 0.0}}}
    views = {"experts": {"edp": 1, "ep": ranks}}
    return simulate(
        job_on({"dp": ranks}, *schemes, samples=ranks, model=model, views=views, **more), shared_work=SHARED
    )


@pytest.mark.parametrize(("tokens", "nodes", "levels"), [(64, 32, "8"), (8192, 2, "None")])
def test_the_way_of_the_all_to_all_is_chosen_with_the_chunks(tokens: int, nodes: int, levels: str) -> None:
    """Small messages of many ranks go in two levels, large ones of few at once; no pair alone is faster."""
    auto = exchanging(tokens, nodes, degree="auto", two_level="auto")
    times = [
        exchanging(tokens, nodes, degree=degree, two_level=near).step_time
        for degree in (1, 2, 4, 8)
        for near in (None, 8)
    ]
    assert auto.step_time == min(times)
    assert any(f"two_level = {levels}" in sentence for sentence in auto.assumed), auto.assumed


def test_all_to_alls_inside_a_node_have_a_single_level() -> None:
    assert exchanging(64, 1, two_level="auto").step_time == exchanging(64, 1).step_time
