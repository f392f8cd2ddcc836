"""Rules of whole plans, and plans that are odd but legal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from meshcast.hardware import load_cluster
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Transfer
from tests.jobs import on_gpus

MODEL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16}


def job(mesh: dict[str, int], *schemes: str, **more: Any) -> dict[str, Any]:
    return {**on_gpus(math.prod(mesh.values()), mesh, *schemes), "model": MODEL, "batch": {"global": 8}, **more}


def test_names_of_axes_mean_nothing() -> None:
    """An axis called pp is no pipeline unless a schedule claims it."""
    report = simulate(job({"pp": 2}, "data/zero-1 over pp"))
    plain = simulate(job({"dp": 2}, "data/zero-1 over dp"))
    assert report.play.plan.shape.p == 1
    assert (report.step_time, report.peak_allocated) == (plain.step_time, plain.peak_allocated)


def test_the_default_batch_counts_all_data_axes() -> None:
    config = job({"x": 2, "y": 4}, "data/ddp over x y", batch={})
    assert simulate(config).job.batch.total == 8


def test_without_overlap_all_gradients_are_reduced_behind_the_last_backward_pass() -> None:
    interleaved = job({"pp": 2, "dp": 2}, "pipeline/interleaved-1f1b over pp", "data/ddp over dp")
    interleaved["plan"]["schemes"][0]["chunks"] = 2
    report = simulate({**interleaved, "framework": {"set": {"overlap": {"dp": False}}}})
    flat, times = report.play.step.flat, report.play.step.times
    for device in range(2):
        last = max(times.end[n] for n, op in enumerate(flat.ops) if flat.device[n] == device and op.phase in ("B", "W"))
        reduced = [n for n in flat.queues[device, "data"] if flat.ops[n].name == "reduce grads"]
        assert len(reduced) == 1
        assert times.begin[reduced[0]] >= last
    assert "dp" not in report.breakdown.hidden


def test_the_slowest_group_sets_the_time_of_all() -> None:
    """Groups of six on nodes of eight: the first stays inside a node, the second does not."""
    costs = Costs(load_cluster("dgx-h100:3"), Mesh({"dp": 4, "tp": 6}))
    whole = Costs(load_cluster("dgx-h100:3"), Mesh({"dp": 3, "tp": 8}))
    work = Collective("all_reduce", 2**24, ("tp",))
    assert costs.estimate(work).seconds > 1.5 * whole.estimate(work).seconds
    near = Costs(load_cluster("dgx-h100:3"), Mesh({"pp": 6, "tp": 4}))
    assert near.estimate(Transfer(2**24, "pp", 0, 1)).seconds < near.estimate(Transfer(2**24, "pp", 1, 2)).seconds


def test_the_narrowest_node_sets_the_time_of_a_group_of_uneven_parts() -> None:
    cluster = {"gpu": "h100-sxm", "gpus_per_node": 8, "inter": {"kind": "infiniband", "gbps_per_gpu": 100}}
    work = Collective("all_reduce", 2**30, ("dp",))
    uneven = Costs(load_cluster({**cluster, "gpus": 12}), Mesh({"dp": 12})).estimate(work).seconds
    even = Costs(load_cluster({**cluster, "gpus": 16}), Mesh({"dp": 16})).estimate(work).seconds
    assert uneven > 1.5 * even


def test_a_step_beyond_playing_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match=r"some 40,000 s and 14,800.0 GB, .* 33,782 would take seconds"):
        simulate(job({"dp": 1}, batch={"global": 999_999_999}))
    deep = {"model": {**MODEL, "layers": 1000}, "batch": {"global": 500}}
    long = simulate(job({"dp": 1}, **deep))
    assert long.step_time > 0
    with pytest.raises(PlanError, match="op by op up to 3,000,000 ops"):
        _ = long.play.step.flat
