"""Limits of a search against brute force: constraints, memory that stays free, measured combinations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.plan_search import has_memory
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.search.space.space import Space
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.step import StepAndMemory
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.peak_errors import EVEN, RISK, peak_error_of
from meshcast.validation.published.measured_range.distance import distance_from_measured
from tests.draws import drawn
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY, every_point

Point = tuple[dict[str, Any], StepAndMemory | None]


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return every_point(Space(TINY, Path(".")))


def total(found: Certificate) -> int:
    return found.decided + found.open


def search(**limits: Any) -> Search:
    made = open_search(TINY, limits=SearchOptions(**limits).limits)
    made.run()
    return made


def dp(point: dict[str, Any]) -> int:
    return 8 // (point["plan.tp"] * point["plan.pp"])


@pytest.mark.parametrize(
    ("where", "admits"),
    drawn(
        [
            (["plan.tp * plan.pp <= 2"], lambda one: one["plan.tp"] * one["plan.pp"] <= 2),
            (["plan.dp == 2", "batch.micro < 2"], lambda one: dp(one) == 2 and one["batch.micro"] < 2),
            (["plan.zero == 0 or plan.tp == 4"], lambda one: one["plan.zero"] == 0 or one["plan.tp"] == 4),
            (["plan.schedule == 'interleaved-1f1b'"], lambda one: one["plan.chunks"] == 2),
            (["plan.schedule == '1f1b'", "plan.chunks == 1"], lambda one: one["plan.chunks"] == 1),
            (["plan.chunks * layers >= 8"], lambda one: one["plan.chunks"] == 2),
            (["model.heads % plan.tp == 0", "gpus == 8"], lambda one: True),
            (["plan.recompute == 'none'", "batch.sequence == 2048", "not plan.fsdp"], lambda one: True),
        ],
        keep=3,
    ),
)
def test_a_constraint_excludes_what_violates_it(
    points: list[Point], where: list[str], admits: Callable[[dict[str, Any]], bool]
) -> None:
    kept = [point for point in points if admits(point[0])]
    found = search(where=where)
    best = min(one.step_time for _, one in kept if one is not None and one.fits)
    assert found.certificate.incumbent == pytest.approx(best, rel=1e-12) and found.certificate.gap == 0
    assert found.certificate.excluded == {"where": len(points) - len(kept), "program": 0, "near_measured": 0}
    assert total(found.certificate) == found.certificate.plans == len(points)


def test_a_constraint_knows_the_default_degree_of_experts() -> None:
    plan = {"tp": 4, "ep": [1, 2], "etp": "auto"}
    batch = {"global": 16, "sequence": 2048}
    job = {**TINY, "model": {"preset": "mixtral-8x7b", "layers": 2}, "batch": batch, "plan": plan}
    space = open_search(job, limits=SearchOptions(where=["plan.etp <= 2"]).limits).space
    assert isinstance(space, Space)
    left = [(group.ep, group.etp) for group in space.groups() if space.size(group)]
    assert left == [(1, 1), (2, None), (2, 2)]


def test_a_constraint_knows_the_order_of_the_mesh() -> None:
    plan = {"tp": 2, "pp": [1, 2], "order": "auto"}
    limits = SearchOptions(where=["plan.pp == 1 or plan.order == 'dp-pp-cp-tp'"]).limits
    space = open_search({**TINY, "plan": plan}, limits=limits).space
    group = space.groups()[0]
    left = [(one.pp, one.mesh_order) for one in space.pipelines(group) if space.choices(group, one)]
    assert left == [(1, "pp-dp-cp-tp"), (2, "dp-pp-cp-tp")]
    assert space.count_excluded(group)["where"] == 1


def test_a_constraint_knows_how_many_ranks_share_a_copy() -> None:
    plan = {"tp": 2, "pp": [1, 2], "zero": 1, "shard": "auto"}
    space = open_search(
        {**TINY, "cluster": "dgx-h100:2", "plan": plan}, limits=SearchOptions(where=["plan.shard <= 4"]).limits
    )
    (one, two), *_ = ([p for p in space.space.pipelines(group)] for group in space.space.groups())
    group = space.space.groups()[0]
    assert [step.shard for step in space.space.choices(group, one)] == [4]
    assert [step.shard for step in space.space.choices(group, two)] == [None]


@pytest.mark.parametrize(
    ("margin", "risk"), [(0.25, EVEN), pytest.param(0.6, EVEN, marks=pytest.mark.slow), (0.75, 0.001), (0.8, RISK)]
)
def test_memory_stays_free(points: list[Point], margin: float, risk: float) -> None:
    """The best of all points whose need, times what a risk asks for, lies within the share."""
    found = search(memory_margin=margin, memory_risk=risk)
    room = peak_error_of(found.space.loaded.framework).ratio(1 - risk)
    capacity = found.space.loaded.cluster.gpu.program_memory * (1 - margin)
    fitting = [one.step_time for _, one in points if one is not None and one.held * room <= capacity]
    assert found.certificate.incumbent == pytest.approx(min(fitting, default=math.inf), rel=1e-12)
    assert total(found.certificate) == found.certificate.plans == len(points)
    assert (found.certificate.memory_margin, found.certificate.memory_risk) == (margin, risk)


def test_a_plan_is_left_out_unless_its_risk_is_taken() -> None:
    batch = {"global": 1, "micro": 1, "sequence": 2048}
    job = {"model": {"preset": "llama3-8b", "layers": 14}, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": batch}
    risk = 1 - simulate({**job, "plan": {"tp": 1}}).fit.probability
    assert 0 < risk < EVEN
    for share, count in ((0.999, 0), (1.001, 1)):
        limits = SearchOptions(memory_risk=share * risk).limits
        made = open_search({**job, "plan": {"tp": 1, "recompute": ["none"]}}, limits=limits)
        made.run()
        assert len(made.best) == count


def test_a_forecast_is_held_against_the_risk_and_the_margin() -> None:
    space = open_search(TINY, limits=SearchOptions(memory_margin=0.5).limits).space
    assert space.capacity * space.least_room == pytest.approx(0.5 * space.loaded.cluster.gpu.program_memory)
    for room, held, fits in ((1.001, 0.999, True), (0.999, 0.999, False), (1.001, 1.001, False)):
        forecast = StepAndMemory(1.0, 1.0, 1.0, held * space.capacity, room * space.least_room)
        assert has_memory(space, forecast) is fits


def test_only_measured_combinations_are_kept(points: list[Point]) -> None:
    space = Space(TINY, Path("."))
    steps = []
    for group in space.groups():
        for pipeline in space.pipelines(group):
            for step in space.steps(group, pipeline.pp):
                plan = resolve_plan(load_job(space.job_of(group, pipeline, step)))
                steps.append(distance_from_measured(plan).measured)
    assert len(steps) == len(points) and 0 < sum(steps) < len(steps)
    found = search(near_measured=True)
    kept = [one.step_time for (_, one), measured in zip(points, steps, strict=True) if measured and one and one.fits]
    assert found.certificate.incumbent == pytest.approx(min(kept), rel=1e-12)
    assert total(found.certificate) == found.certificate.plans == len(points)
    assert 0 < found.certificate.excluded["near_measured"] <= len(points) - sum(steps)


def test_counts_of_an_interrupted_search_add_up() -> None:
    made = open_search(TINY, limits=SearchOptions(where=["plan.tp < 4"], near_measured=True).limits)

    def stop(certificate: Certificate) -> None:
        if certificate.opened == 1:
            raise KeyboardInterrupt

    found = made.run(stop)
    assert not found.complete and found.excluded["where"] > 0 and total(found) == found.plans


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"where": ["plan.tpp < 2"]}, r"where is 'plan\.tpp < 2': plan\.tpp is no name that a constraint of"),
        ({"where": ["plan.tp < 0"]}, "where is 'plan.tp < 0': all 32 plans of the space are excluded"),
        ({"where": ["plan.tp > 2", "plan.pp > 2"]}, "where is 'plan.tp > 2 and plan.pp > 2': all 32 plans"),
        ({"where": ["plan.tp"]}, "plan.tp is 1, neither true nor false"),
        ({"where": ["plan.schedule < 3"]}, "is no number"),
        ({"where": "plan.tp < 2"}, "constraints are a list of texts"),
        ({"memory_margin": 1}, "memory_margin is 1: a margin is a share of the memory of a GPU from 0 to below 1"),
        ({"memory_margin": math.nan}, "memory_margin is nan"),
        (
            {"memory_risk": 0},
            "memory_risk is 0: it is the most probability of lacking memory that a plan may have",
        ),
        ({"memory_risk": 0.6}, "memory_risk is 0.6: .* above 0 and up to 0.5"),
    ],
)
def test_wrong_limits_are_refused(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        open_search(TINY, limits=SearchOptions(**limits).limits).count()


def test_jobs_that_nobody_has_run_are_refused() -> None:
    for job, words in (
        ({**TINY, "cluster": {"gpu": "v100-sxm2-32", "gpus": 8}, "precision": "fp16"}, "nobody has published a run of"),
        ({**TINY, "batch": {"global": 393216}, "cluster": "dgx-h100:49152"}, "was run on 393,216 GPUs"),
    ):
        with pytest.raises(PlanError, match=words):
            open_search(job, limits=SearchOptions(near_measured=True).limits).count()


# ------------------------------------------------------------------------------------------- the command


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(TINY), "utf-8")
    return path


def test_the_page_counts_what_is_excluded(job: Path) -> None:
    limits = ["--where", "plan.tp < 4", "--where", "plan.pp < 8", "--memory-margin", "10%", "--near-measured"]
    words = " ".join(run("search", job, *limits).stdout.split())
    assert "by --where" in words and "margin 10.00% of the memory of every GPU stays free" in words
    assert "by --near-measured: nobody has run their combination" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--where", "plan.tp << 2"], "--where is 'plan.tp << 2': a constraint says yes or no. Compare"),
        (["--where", "tp < 2"], "--where is 'tp < 2': tp is no name that a constraint of a search knows. "),
        (["--where", "plan.tp = 2"], "--where is 'plan.tp = 2': it cannot be read (invalid syntax). Compare with =="),
        (["--memory-margin", "100%"], "--memory-margin is '100%': a margin is a share"),
        (["--memory-risk", "60%"], "--memory-risk is '60%': it is the most probability of lacking memory"),
        (["--memory-risk", "ten"], "--memory-risk is 'ten': it is the most probability of lacking memory"),
        (["--memory-margin", "ten"], "--memory-margin is 'ten': a margin is a share of the memory of a GPU from 0 to"),
    ],
)
def test_mistakes_are_explained_in_a_line(job: Path, options: list[str], words: str) -> None:
    result = run("search", job, *options)
    assert result.exit_code == 2 and result.stdout == "" and len(result.stderr.splitlines()) == 1
    assert words in result.stderr
