"""Bytes between ranks: against hand counts, against the trace of the step, and for every plan of the golden jobs."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshcast.experiments.explain.executed_ops import list_executed_ops
from meshcast.experiments.explain.rank_messages import split_positions
from meshcast.experiments.views.communication import communication_matrix, group_ranks
from meshcast.simulator import load_job, simulate
from meshcast.simulator.program.block import SUMS
from meshcast.simulator.report.trace import write_trace
from tests.draws import drawn

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def small(plan: dict[str, Any], gpus: int, nodes: int = 1, **more: Any) -> Any:
    job = {
        "model": "llama3-8b",
        "cluster": {"gpu": "h100-sxm", "gpus": gpus, "gpus_per_node": gpus // nodes},
        "batch": {"global": 8, "micro": 1, "sequence": 4096},
        "plan": plan,
        **more,
    }
    return simulate(load_job(job))


def golden_job(name: str) -> Any:
    return load_job(yaml.safe_load((GOLDEN / f"{name}.yaml").read_text("utf-8"))["job"], base=GOLDEN)


def test_messages_of_a_pipeline() -> None:
    """Eight micro-batches of 4096 x 4096 activations in two bytes go forward and as many gradients come back."""
    found = communication_matrix(small({"pp": 2}, 2))
    message = 8 * 4096 * 4096 * 2
    assert found.by_axis["pp"].tolist() == [[0, message], [message, 0]]
    # The norm of all gradients is a sum of four bytes, and of no mesh axis: it counts as data-parallel.
    assert found.sums == {"dp": 8.0, "pp": 2.0 * message}


def test_gradients_of_data_parallel_ranks() -> None:
    """An all-reduce of four bytes of each of 8.03 billion gradients, apart from the four bytes of their norm."""
    report = small({"dp": 4, "zero": 0}, 4)
    found = communication_matrix(report)
    gradients = 4.0 * 8_030_261_248
    assert found.sums["dp"] == pytest.approx(2 * 3 * gradients, rel=1e-6)
    # Every pair of members exchanges as much, by the switch or around rings in both directions.
    assert found.by_axis["dp"].sum(axis=1) == pytest.approx(2 * 3 / 4 * gradients, rel=1e-6)


def test_rings_cross_nodes_through_every_port() -> None:
    """ZeRO-1 over two nodes of two: each rank sends half of its reduce-scatter to the other node."""
    report = small({"dp": 4, "zero": 1}, 4, nodes=2)
    found = communication_matrix(report)
    elements = 8_030_261_248
    sent = 0.75 * (4.0 * elements + 2.0 * elements)  # reduce-scatter of gradients, all-gather of weights
    assert found.by_axis["dp"].sum(axis=1) == pytest.approx(sent, rel=1e-4)
    assert found.by_axis["dp"][0, 2] == pytest.approx(sent / 2, rel=1e-4)
    nodes = communication_matrix(report, "node")
    assert nodes.names == ("node 0", "node 1")
    assert nodes.total.sum() == pytest.approx(found.total.sum())
    assert nodes.total[0, 1] == pytest.approx(found.total[:2, 2:].sum())


def test_groupings_sum_the_same_ranks() -> None:
    report = simulate(golden_job("all-five-axes"))
    ranks, stages = communication_matrix(report, "rank"), communication_matrix(report, "stage")
    _, stage_of = group_ranks(report.play.plan, "stage")
    for axis, matrix in ranks.by_axis.items():
        for row in range(len(stages.names)):
            for column in range(len(stages.names)):
                cell = matrix[np.ix_(stage_of == row, stage_of == column)].sum()
                assert stages.by_axis[axis][row, column] == pytest.approx(cell)
    assert set(ranks.by_axis) == {"tp", "cp", "ep", "dp", "pp"}


@pytest.mark.parametrize(
    "name", drawn(["sequence-usp", "pipeline-interleaved", "data-zero-plus-plus", "all-five-axes"], keep=2)
)
def test_the_sum_is_that_of_the_ops_in_the_trace(name: str, tmp_path: Path) -> None:
    """`predict --trace` states the buffer of every collective and message; the algorithms' totals follow."""
    report = simulate(golden_job(name))
    plan, place = report.play.plan, tmp_path / "trace.json"
    write_trace(report, place)
    expected: dict[str, float] = defaultdict(float)
    for event in json.loads(place.read_text("utf-8"))["traceEvents"]:
        work = event.get("args", {})
        if event["ph"] != "X" or work.get("work") not in ("collective", "transfer"):
            continue
        if work.get("Collective name") == "recv":  # the other end of a message
            continue
        device = work["device"]
        ranks, sent = len(plan.ranks.of_device(device)), 1.0
        if work["work"] == "collective":
            n = len(work.get("members") or ()) or plan.on(device).mesh.size(work["axes"])
            usual = (n - 1) / n
            sent = {"all_reduce": 2 * usual, "shift": 2.0 if work["both_ways"] else 1.0}.get(work["operation"], usual)
        axis = work["kind"] if work["kind"] in ("tp", "cp", "ep", "dp", "pp") else "dp"
        expected[axis] += sent * work["nbytes"] * ranks
    assert communication_matrix(report).sums == pytest.approx(dict(expected))


@pytest.mark.parametrize("path", drawn(sorted(GOLDEN.glob("*.yaml"))[::6], keep=2), ids=lambda path: path.stem)
def test_every_plan_has_a_matrix(path: Path) -> None:
    """Executed ops have the FLOPs of the report; ranks send to existing other ranks, each a finite number of bytes."""
    if path.stem in ("llama3-70b-dgx-h100", "pipeline-from-file"):
        pytest.skip("its job names files by a path of its own")
    report = simulate(golden_job(path.stem))
    flops = np.zeros(report.play.program.devices)
    for one in list_executed_ops(report):
        assert one.op.work is not None
        flops[one.device] += one.op.work.flops * one.count
    assert flops == pytest.approx(report.sums[..., SUMS.index("flops")].sum(axis=1))
    found = communication_matrix(report)
    for axis, matrix in found.by_axis.items():
        assert np.isfinite(matrix).all() and (matrix >= 0).all()
        if found.grouping == "rank":
            assert not matrix.diagonal().any(), axis


def test_offloaded_states_are_copied_to_the_host() -> None:
    """ZeRO-Offload sends gradients to the host and weights back, as often as the trace says."""
    report = simulate(golden_job("data-zero-offload"))
    found = communication_matrix(report)
    assert (found.host > 0).all()


def test_members_stand_for_all_groups_that_they_divide_an_axis_into() -> None:
    assert [one.tolist() for one in split_positions((0, 1, 2, 3), 8)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one.tolist() for one in split_positions((0, 4), 8)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [one.tolist() for one in split_positions((0, 7), 8)] == [[0, 7]]
    assert [one.tolist() for one in split_positions((1, 2), 4)] == [[1, 2]]


def test_a_tied_table_is_summed_between_the_first_ranks_of_unequal_stages() -> None:
    """Once between the two, all of it: rank 1 has no peer in the stage of one rank."""
    stages = [{"tp": 2}, {"tp": 1}]
    size = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "seq": 64}
    tied, untied = (
        communication_matrix(small({"stages": stages}, 3, model={**size, "tied": tied}, batch={"global": 2})).total
        for tied in (True, False)
    )
    table = 4.0 * 512 * 64
    assert (tied - untied).tolist() == [[0, 0, table], [0, 0, 0], [table, 0, 0]]
