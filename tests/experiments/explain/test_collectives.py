"""Collectives of a step as tables of nccl-tests, against hand counts."""

from __future__ import annotations

from meshcast.experiments.explain.collectives import tables_of_job
from meshcast.simulator import simulate
from tests.jobs import JOBS


def test_stages_send_an_activation_or_a_gradient_a_micro_batch() -> None:
    """Of 64 positions x 64 values in bf16."""
    report = simulate({**JOBS["pipeline"], "batch": {"global": 4, "micro": 1}})
    for stage, ranks in ((0, (0, 1)), (1, (1, 0))):
        (group,) = (group for group in tables_of_job(report, stage) if group.operation == "send_recv")
        assert (group.axes, group.ranks) == (("pp",), ranks)
        assert [(line.nbytes, line.calls) for line in group.table.lines] == [(64 * 64 * 2, 4)]


def test_gradients_are_summed_once_a_step() -> None:
    """Of all parameters, in the precision of gradients: fp32."""
    report = simulate({**JOBS["data parallel"], "batch": {"global": 8, "micro": 1}})
    groups = tables_of_job(report)
    assert {group.ranks for group in groups} == {(0, 1, 2, 3)} and {group.axes for group in groups} == {("dp",)}
    nbytes = sum(line.nbytes * line.calls for group in groups for line in group.table.lines if line.nbytes > 1_000)
    assert abs(nbytes / (4 * report.job.model.parameters) - 1) < 0.01
