"""Sharded states: how far ahead weights are gathered, and laws that hold for every scheme."""

from __future__ import annotations

import json
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective
from meshcast.simulator.models.model import Model
from meshcast.simulator.report.trace import write_trace
from meshcast.simulator.schemes.data.shared.gather_plan import GatheredWeights, find_modules
from meshcast.validation.contract.measure import lowered_stage, make
from meshcast.validation.contract.played import FREE, Ideal, play_job
from tests.draws import drawn_grid
from tests.simulator.schemes.small_jobs import LAYER, LAYERS, UNITS, H, V, job_of, wire
from tests.strategies import examples

# ----------------------------------------------------------------------------------------------------------- prefetch

DEPTHS = (0, 1, 2, 3)


@pytest.mark.parametrize(("batch", "depth"), drawn_grid([1, 3], DEPTHS))
def test_every_level_of_prefetch_is_one_more_whole_unit(depth: int, batch: int) -> None:
    played = play_job(job_of("data/fsdp", {"dp": 4}, batch, prefetch=depth))
    assert played.category_peak(0, "parameters") == (depth + 1) * 2 * LAYER
    assert all(peak.left == 0 for peak in played.peaks)


def test_the_prefetch_depth_defaults_to_that_of_the_framework() -> None:
    for overlap in (True, False):
        framework = {"overlap": {"dp": overlap, "pp": True}}
        usual = play_job(job_of("data/fsdp", {"dp": 4}, 2, framework))
        played = play_job(job_of("data/fsdp", {"dp": 4}, 2, framework, prefetch=int(overlap)))
        assert (usual.times, usual.peaks) == (played.times, played.peaks)


@examples(25)
@given(rate=st.sampled_from([1e5, 1e6, 3e6, 1e7, 1e8]), batch=st.integers(1, 3), ahead=st.booleans())
def test_prefetch_is_never_slower_where_nothing_is_shared(rate: float, batch: int, ahead: bool) -> None:
    """And the bytes are the same."""
    spans, bytes_sent = [], set()
    for depth in DEPTHS:
        job = job_of("data/fsdp", {"dp": 4}, batch, prefetch=depth, backward_prefetch=ahead)
        played = play_job(job, Ideal(links=rate), engine="sweep")
        spans.append(played.times.span)
        bytes_sent.add(tuple(sorted(wire(played))))
    assert all(later <= sooner * (1 + 1e-12) for sooner, later in pairwise(spans))
    assert len(bytes_sent) == 1


@pytest.mark.parametrize(("rate", "depth"), drawn_grid([1e6, 1e7, 1e8], DEPTHS))
def test_a_forward_pass_by_hand(depth: int, rate: float) -> None:
    """A gather begins when the one before has ended and the unit that far ahead of it begins; a unit computes when the
    one before has, and its weights have come."""
    played = play_job(job_of("data/fsdp", {"dp": 4}, prefetch=depth), Ideal(links=rate))
    flat, times = played.flat, played.times
    task = played.task(0)
    computes = []
    for part in task.parts:
        prices = zip(part.block.ops, part.seconds, strict=True)
        computes += [sum(seconds for op, seconds in prices if op.stream == "compute")] * part.count
    begins: list[float] = []
    came: list[float] = []
    done = 0.0
    for unit, seconds in enumerate(computes):
        while len(came) <= min(unit + depth, len(UNITS) - 1):
            at = len(came)
            # What is gathered ahead is asked for when the unit before it that far begins, the first ones at once.
            asked = max(done, came[unit] if unit else 0.0) if at > unit else done
            came.append(max(came[-1] if came else 0.0, asked) + 2 * UNITS[at] / rate)
        begins.append(max(done, came[unit]))
        done = begins[-1] + seconds
    kernels = [n for n in played.ops(0) if flat.ops[n].stream == "compute"]
    assert max(times.end[n] for n in kernels) == pytest.approx(done)
    gathers = [n for n in played.ops(0) if isinstance(flat.ops[n].work, Collective)]
    assert [times.end[n] for n in gathers] == pytest.approx(came)


def test_without_backward_prefetch_a_gather_stands_behind_the_scatter() -> None:
    """With it the wire carries the gather of the unit before, then the scatter; one direction costs the same."""
    orders = {}
    for ahead in (True, False):
        played = play_job(job_of("data/fsdp", {"dp": 4}, backward_prefetch=ahead), Ideal(links=5e6))
        moved = [operation for operation, _ in wire(played)][len(UNITS) :]
        orders[ahead] = moved, played.times.span
    n = len(UNITS)
    assert orders[True][0] == ["all_gather"] + ["all_gather", "reduce_scatter"] * (n - 1) + ["reduce_scatter"]
    assert orders[False][0] == ["all_gather", "reduce_scatter"] * n
    assert orders[True][1] < orders[False][1]


@pytest.mark.parametrize("recomputed", [True, False])
def test_reentrant_checkpoints_gather_a_unit_twice_and_none_ahead(recomputed: bool) -> None:
    """Each layer for its recomputation, behind the scatter of the one before, and meanwhile for its backward pass."""
    orders = {}
    for reentrant in (True, False):
        job = job_of("data/fsdp", {"dp": 4}, framework={"reentrant_units": reentrant})
        job["plan"]["schemes"] += [{"use": "memory/recompute-full"}] if recomputed else []
        played = play_job(job, Ideal(links=5e6))
        orders[reentrant] = [operation for operation, _ in wire(played)][len(UNITS) :], played.times.span
        assert all(peak.left == 0 for peak in played.peaks)
    if not recomputed:
        assert orders[True] == orders[False]
        return
    end = ["all_gather", "reduce_scatter"]
    assert orders[True][0] == [*end, *["all_gather", *end] * LAYERS, *end]
    assert orders[True][1] > orders[False][1]


def test_gradients_of_flat_parameters_are_copied_and_divided_before_they_are_reduced() -> None:
    """Each kernel reads and writes the two bytes of every gradient."""
    job = job_of("data/fsdp", {"dp": 4}, framework={"bucket": {"flat": True}, "gradients": "bf16"})
    works = [op.work for _, op in play_job(job).instances() if op.name in ("flatten grads", "divide grads")]
    assert sum(work.read for work in works) == sum(work.write for work in works) == 2 * 2 * sum(UNITS)  # type: ignore[union-attr]


MATRIX = H * H
FORWARD = [V * H, *[H, 3 * MATRIX, 0, 0, MATRIX, 0, H, 4 * MATRIX, 0, 4 * MATRIX, 0] * LAYERS, H, V * H, 0]
"""Elements of the operators of a forward pass: table; norm, QKV, rotation, attention, projection, sum, norm, MLP, sum;
norm, output layer, loss."""
BACKWARD = [0, V * H, H, *[4 * MATRIX, 0, 4 * MATRIX, H, 0, MATRIX, 0, 0, 3 * MATRIX, H, 0] * LAYERS, V * H]
"""Those of a backward pass, in which the gradients of the residual stream are added."""


def coordinate(sizes: list[int], bucket: int, live_limit: int) -> int:
    """Most elements that are whole at a time if each module asks for its own and then for those that follow, as
    DeepSpeed's `fetch_sub_module` does: a queue, a count of available elements, a count of the elements asked for.
    """
    queue, available, asked, most = deque(range(len(sizes))), 0, set[int](), 0
    for module, size in enumerate(sizes):
        if module not in asked:
            asked.add(module)
            available += size
        while queue and queue[0] in asked:
            queue.popleft()
        room, prefetching = min(live_limit - available, bucket), 0
        while queue and prefetching < room:
            following = queue.popleft()
            asked.add(following)
            prefetching += sizes[following]
        available += prefetching
        most = max(most, available)
        available -= size
    return most


@pytest.mark.parametrize(
    ("max_live", "bucket"),
    drawn_grid(
        [MATRIX, 4 * MATRIX, 4 * MATRIX + 1, LAYER, 2 * LAYER, 1_000_000_000],
        [0, 1, MATRIX, 4 * MATRIX + 1, LAYER, 50_000_000],
    ),
)
def test_zero_3_gathers_ahead_by_module(bucket: int, max_live: int) -> None:
    """As a replay of DeepSpeed's coordinator says."""
    options = {"persistence": 0, "prefetch_bucket": bucket, "max_live": max_live}
    played = play_job(job_of("data/zero-3", {"dp": 4}, **options))
    most = max(coordinate(sizes, bucket, max_live) for sizes in (FORWARD, BACKWARD))
    # Of weights that are wanted more than four units ahead a unit holds the most that it asks for from its start on.
    assert most <= played.category_peak(0, "parameters") / 2 <= most + (LAYER if most > 4 * LAYER else 0)


@pytest.mark.parametrize("use", ["data/zero-3", "data/zero-infinity", "data/zero-plus-plus"])
def test_layers_above_the_limit_of_whole_elements_are_gathered_ahead(use: str) -> None:
    """Matrix by matrix, which hides most of what is hidden without a limit."""

    def seconds(**options: Any) -> float:
        all_sharded = {"persistence": 0} if use == "data/zero-3" else {}
        return play_job(
            job_of(use, {"across": 2, "within": 2}, 4, **all_sharded, **options), Ideal(links=3e7)
        ).times.span

    exposed = seconds(prefetch_bucket=0)
    assert exposed - seconds(max_live=LAYER // 2) > 0.75 * (exposed - seconds()) > 0.1 * exposed


AGAIN = [0, H, 3 * MATRIX, 0, 0, MATRIX, 0, H, 4 * MATRIX, 0, 4 * MATRIX, 0]
"""Elements of the operators of a layer as its forward pass is repeated, in the order of `FORWARD`."""


def gathered_in_recompute(distance: int) -> list[int]:
    """Elements that the backward pass of a recomputed layer gathers, in order: those of every use, unless the trace of
    DeepSpeed's coordinator meets the module again before it has passed `distance` elements (`__params_to_release`).
    """
    trace = [(size, i) for i, size in enumerate(AGAIN)] + [(size, i) for i, size in enumerate(AGAIN)][::-1]
    found, whole = [], set[int]()
    for step, (size, module) in enumerate(trace):
        if module not in whole and size:
            found.append(size)
        whole.discard(module)
        passed = 0
        for other_size, other in trace[step + 1 :]:
            if passed >= distance:
                break
            if other == module:
                whole.add(module)
                break
            passed += other_size
    return found


@pytest.mark.parametrize(
    ("distance", "use"),
    drawn_grid(
        [1, H + 1, MATRIX, 4 * MATRIX, 8 * MATRIX, 16 * MATRIX + H + 1, LAYER, 2 * LAYER],
        ["data/zero-3", "data/zero-infinity"],
    ),
)
def test_recomputed_modules_are_gathered_again_unless_they_are_soon_needed(use: str, distance: int) -> None:
    options: dict[str, Any] = {"persistence": 0} if use == "data/zero-3" else {}
    job = job_of(use, {"dp": 4}, max_reuse_distance=distance, max_live=0, **options)
    job["plan"]["schemes"].append({"use": "memory/recompute-full"})
    played = play_job(job)
    layer = next(run for run in played.stage_ops(0).unit_runs if run.name == "layer").fragment
    works = [op.work for op in layer.backward if isinstance(op.work, Collective)]
    gathered = [work.nbytes // 2 for work in works if work.operation == "all_gather"]
    assert sorted(gathered) == sorted(gathered_in_recompute(distance))
    assert all(peak.left == 0 for peak in played.peaks)


def test_modules_of_a_recomputed_pass_leave_no_op_between_them() -> None:
    """Whatever is gathered again: the weights of one stay until those of the next come, through all ops of tensor
    ranks."""
    model, mesh = Model(layers=1, hidden=H, heads=4, vocab=V, seq=16), Mesh({"tp": 2})
    tensor = make("tensor/megatron-sp", mesh, ("tp",))
    stage = lowered_stage(model, mesh, [tensor, make("memory/recompute-full", mesh)])
    fragment = stage.unit_runs[0].fragment
    sharded = [(param, GatheredWeights(((("dp",), param.size),), param.size)) for param in fragment.params]
    for reuse in (0, MATRIX, LAYER):
        modules = find_modules(fragment, sharded, False, reuse)
        assert modules[0].begin == 0 and modules[-1].end == len(fragment.backward) - 1
        assert all(one.end + 1 >= following.begin > one.begin for one, following in pairwise(modules))


READY = [4 * MATRIX, 4 * MATRIX, H, MATRIX, MATRIX, MATRIX, MATRIX, H]
"""Elements of the gradients of a layer as they get ready: two of the MLP, norm, projection, Q, K, V, norm."""


def buckets_of(limit: int) -> list[int]:
    """Elements of the buckets of a layer, as DeepSpeed's `reduce_independent_p_g_buckets_and_remove_grads` fills them:
    a gradient that has no room in the bucket begins the next one.
    """
    found = [0]
    for size in READY:
        if found[-1] and found[-1] + size > limit:
            found.append(0)
        found[-1] += size
    return found


@pytest.mark.parametrize(
    ("limit", "use"),
    drawn_grid(
        [0, H, MATRIX, 4 * MATRIX, 4 * MATRIX + H, 5 * MATRIX, LAYER],
        ["data/zero-3", "data/zero-infinity", "data/zero-plus-plus"],
    ),
)
def test_gradients_of_large_layers_are_reduced_in_buckets(use: str, limit: int) -> None:
    options: dict[str, Any] = {"data/zero-3": {"persistence": 0}, "data/zero-plus-plus": {"qgz": False}}.get(use, {})
    mesh = {"across": 2, "within": 2} if use == "data/zero-plus-plus" else {"dp": 4}
    played = play_job(job_of(use, mesh, reduce_bucket=limit, **options))
    layer = next(run for run in played.stage_ops(0).unit_runs if run.name == "layer").fragment
    works = [op.work for op in layer.backward if isinstance(op.work, Collective)]
    reduced = [work.nbytes // 4 for work in works if work.operation == "reduce_scatter"]
    assert reduced == buckets_of(limit)


def test_gradients_in_buckets_take_the_memory_of_two() -> None:
    """One is being reduced while the next is computed; the last one of a layer during that of the layer before."""
    whole = play_job(job_of("data/zero-3", {"dp": 4}, persistence=0)).category_peak(0, "gradients")
    for limit in (MATRIX, 4 * MATRIX, 5 * MATRIX):
        sizes = buckets_of(limit)
        played = play_job(job_of("data/zero-3", {"dp": 4}, persistence=0, reduce_bucket=limit))
        most = max(a + b for a, b in pairwise([sizes[-1], *sizes]))
        assert most <= played.category_peak(0, "gradients") / 4 <= most + max(sizes[-1], UNITS[-1])
        assert played.category_peak(0, "gradients") < whole


# -------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("use", ["data/fsdp", "data/mics"])
def test_free_links_leave_the_computing(use: str) -> None:
    for options in ({}, {"prefetch": 3}) if use == "data/fsdp" else ({},):
        job = job_of(use, {"replicas": 2, "dp": 4}, 3, replicate="replicas", **options)
        played = play_job(job, FREE)
        busy = sum(played.flat.seconds[n] for n, op in played.instances())
        assert played.times.span == pytest.approx(busy)


def test_a_trace_shows_every_stream_that_moves_something(tmp_path: Path) -> None:
    """Copies of groups have a thread of their own behind the family's first; news of weights are no slices."""
    job = job_of("data/fsdp", {"replicate": 2, "shard": 4}, replicate="replicate", prefetch=3)
    write_trace(simulate(job), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert {"data", "data-replicas"} <= set(threads)
    assert not [name for name in threads if name.startswith(("data-forward", "data-backward"))]
    assert threads["data-replicas"] == threads["data"] + 1
    assert {event["tid"] for event in events if event["ph"] == "X"} <= set(threads.values())
