"""ZeRO-Infinity: bytes over the links to the hosts, their time, and memory left on the GPU."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import Collective, Gemm, HostCopy, HostUpdate, Op
from meshcast.validation.contract.played import Played, play_job
from tests.draws import drawn_grid
from tests.simulator.schemes.small_jobs import GPT, copied, job_on
from tests.strategies import examples

USE = "data/zero-infinity"


def job(n: int, batches: int = 1, gradients: str = "fp32", layers: int = 3, micro: int = 1, **options: Any) -> Any:
    """A small GPT on n ranks."""
    more = {"batch": {"global": n * batches * micro, "micro": micro}, "precision": {"gradients": gradients}}
    scheme = {"use": USE, "over": "dp", **options}
    return job_on({"dp": n}, scheme, samples=n, model={**GPT, "layers": layers, "seq": 32}, **more)


@pytest.mark.parametrize(("batches", "n"), drawn_grid([1, 3], [2, 4, 8, 64]))
def test_two_shards_of_the_weights_come_and_one_of_the_gradients_goes(n: int, batches: int) -> None:
    """2 M/N down and M/N up, per rank and micro-batch."""
    found = play_job(job(n, batches, "bf16"))
    whole = 2 * found.plan.job.model.parameters
    assert copied(found, back=True) == pytest.approx(batches * 2 * whole / n, rel=1e-3)
    assert copied(found, back=False) == pytest.approx(batches * whole / n, rel=1e-3)
    assert all(peak.left == 0 for peak in found.peaks)
    assert set(found.resting(0).values()) == {0}


@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_links_bring_a_part_of_every_unit(n: int) -> None:
    """1/N of the bytes that an owner would have to load before a broadcast: N times the bandwidth."""
    found = play_job(job(n))
    units = {op.work.nbytes for _, op in found.instances() if _gathers(op)}
    shards = {op.work.nbytes for _, op in found.instances() if isinstance(op.work, HostCopy) and op.work.back}
    assert {n * shard for shard in shards} == units


def _gathers(op: Op) -> bool:
    return isinstance(op.work, Collective) and op.work.operation == "all_gather"


@examples(20)
@given(n=st.sampled_from([2, 4, 8]), micro=st.integers(1, 4), unit_run=st.sampled_from([1e6, 1e8]))
def test_the_efficiency_is_that_of_the_arithmetic_intensity(n: int, micro: int, unit_run: float) -> None:
    """ait bw / (ait bw + peak), where nothing overlaps; ait is tokens times the linears' share of parameters."""
    peak = 1e9
    found = play_job(job(n, 1, "bf16", micro=micro))
    linear = sum(op.work.m * op.work.n * op.work.k * op.work.batch for _, op in found.instances() if _linear(op))
    compute = sum(op.work.flops for _, op in found.instances() if isinstance(op.work, Gemm)) / peak
    copies = (copied(found, True) + copied(found, False)) / unit_run
    ait, bw = linear / found.plan.job.model.parameters, n * unit_run
    assert 0.5 * micro * 32 < ait < micro * 32
    assert compute / (compute + copies) == pytest.approx(ait * bw / (ait * bw + peak), rel=1e-3)


def _linear(op: Op) -> bool:
    return isinstance(op.work, Gemm) and op.phase == "F"


@pytest.mark.parametrize(
    ("optimizer", "parameters", "overlap"), drawn_grid(["cpu", "nvme"], ["gpu", "cpu", "nvme"], [True, False])
)
def test_states_are_stored_where_the_options_state(parameters: str, optimizer: str, overlap: bool) -> None:
    n = 4
    config = job(n, parameters=parameters, optimizer=optimizer)
    config["framework"] = {"name": "megatron-core", "set": {"overlap": {"dp": overlap}}}
    found = play_job(config)
    elements = found.plan.job.model.parameters
    held = {"parameters": 2 * elements / n if parameters == "gpu" else 0, "gradients": 0, "optimizer": 0}
    assert found.resting(0) == pytest.approx(held, rel=1e-3)
    weights = 2 * elements / n if parameters == "gpu" else 4 * elements / n
    assert copied(found, True, "cpu" if parameters == "gpu" else parameters) == pytest.approx(weights, rel=1e-2)
    assert copied(found, False, optimizer) == pytest.approx(4 * elements / n, rel=1e-3)
    (step,) = [op.work for _, op in found.instances() if op.name == "adam on the host"]
    assert isinstance(step, HostUpdate)
    assert step.nbytes == pytest.approx(30 * elements / n, rel=1e-3)
    assert (step.loaded > 0) == (step.stored > 0) == (optimizer == "nvme")


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8])
def test_gpus_update_the_states_that_a_ratio_leaves_them(ratio: float) -> None:
    """While the host updates its own; gradients of these alone go to it."""
    n = 4
    found = play_job(job(n, parameters="gpu", ratio=ratio))
    elements = found.plan.job.model.parameters / n
    held = {
        "parameters": 2 * elements,
        "gradients": 4 * (1 - ratio) * elements,
        "optimizer": 12 * (1 - ratio) * elements,
    }
    assert found.resting(0) == pytest.approx(held, rel=1e-3)
    assert copied(found, False, "cpu") == pytest.approx(4 * ratio * elements, rel=1e-3, abs=1)
    steps = {op.name: number for number, op in found.instances() if op.name.startswith("adam")}
    assert set(steps) == ({"adam", "adam on the host"} if ratio else {"adam"})
    if ratio:
        assert found.times.begin[steps["adam"]] == found.times.begin[steps["adam on the host"]]


@pytest.mark.parametrize("batches", [1, 3])
def test_one_rank_offloads_without_collectives(batches: int) -> None:
    """40 B parameters on one V100 (DeepSpeed's ZeRO-3 Offload): states on the host, modules come one after another."""
    found = play_job(job(1, batches))
    elements = found.plan.job.model.parameters
    assert found.resting(0) == {"parameters": 0, "gradients": 0, "optimizer": 0}
    assert copied(found, True) == 4 * elements * batches
    assert copied(found, False) == 4 * elements * batches
    assert not any(isinstance(op.work, Collective) for _, op in found.instances())
    assert found.peaks[0].left == 0


def test_a_model_that_fits_no_gpu_fits_with_its_hosts() -> None:
    """A trillion parameters on one DGX-2 (section 8.2): of 16 bytes each no GPU has a sixteenth, of units all have."""
    shape = {"layers": 128, "hidden": 25600, "heads": 200, "vocab": 51200, "seq": 1024, "tied": False}
    plan = {"mesh": {"dp": 16}, "schemes": [{"use": USE, "over": "dp"}, {"use": "memory/recompute-full"}]}
    job = {"model": shape, "cluster": "dgx-2:1", "batch": {"global": 16}, "plan": plan, "precision": "fp16"}
    report = simulate(job)
    assert 0.9e12 < report.job.model.parameters < 1.1e12
    less = {**plan, "schemes": [{"use": "data/zero-3", "over": "dp"}, {"use": "memory/recompute-full"}]}
    assert report.peak_allocated < 1 / 10 * simulate({**job, "plan": less}).peak_allocated


def gemms(found: Played) -> dict[str, float]:
    """FLOPs of the GEMMs by their operand layouts."""
    flops: dict[str, float] = defaultdict(float)
    for _, op in found.instances():
        if isinstance(op.work, Gemm):
            flops[op.work.layout] += op.work.flops
    return flops


@pytest.mark.parametrize(("n", "tiles", "recompute"), drawn_grid([1, 4], [2, 3, 8], [True, False]))
def test_tiles_do_the_same_work_in_less_memory(n: int, tiles: int, recompute: bool) -> None:
    """The matrices of the MLP have 4 h^2 elements, their tiles 1/T of these (section 5.1.3)."""
    whole, tiled = job(n, max_live=0), job(n, max_live=0, reduce_bucket=0, tiles=tiles)
    for one in (whole, tiled) if recompute else ():
        one["plan"]["schemes"].append({"use": "memory/recompute-full"})
    before, after = play_job(whole), play_job(tiled)
    assert gemms(after) == pytest.approx(gemms(before))
    assert after.list_held(0) and sum(p.size for p in after.list_held(0)) == sum(p.size for p in before.list_held(0))
    assert copied(after, False) == pytest.approx(copied(before, False), rel=1e-2)
    assert after.peaks[0].left == 0
    if not recompute:  # else how often a module is gathered depends on `max_reuse_distance`
        assert copied(after, True) == pytest.approx(copied(before, True), rel=1e-2)
    layers = [next(run for run in found.stage_ops(0).unit_runs if run.name == "layer") for found in (before, after)]
    most = [max(param.size for param in run.fragment.params) for run in layers]
    assert most == [4 * 64 * 64, -(-4 * 64 * 64 // tiles)]
    assert after.category_peak(0, "gradients") < before.category_peak(0, "gradients")


def test_a_trillion_parameters_fit_on_one_dgx_2_in_tiles() -> None:
    """Section 8.2: states on the disks of the node. Whole matrices of 25,600 x 102,400 leave too little room."""
    shape = {"layers": 128, "hidden": 25600, "heads": 256, "vocab": 50304, "seq": 1024}
    fits = {}
    for tiles in (1, 4):
        scheme = {"use": USE, "over": "dp", "parameters": "nvme", "optimizer": "nvme", "tiles": tiles}
        plan = {"mesh": {"dp": 16}, "schemes": [scheme, {"use": "memory/recompute-full"}]}
        job = {"model": shape, "cluster": "dgx-2:1", "batch": {"global": 16}, "plan": plan}
        report = simulate({**job, "framework": "megatron-deepspeed", "precision": {"compute": "fp16"}})
        assert report.job.model.parameters > 1e12
        fits[tiles] = report.fits
    assert fits == {1: False, 4: True}
