"""What `advise` proposes is run by the program, is worth what is said, and is as good as a search."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import meshcast
from meshcast import Advice, advise
from meshcast.experiments.advice.advice import AdvisedPlan
from meshcast.experiments.advice.neighbours import LOSS, PlanNeighbours
from meshcast.experiments.advice.trials import merge_fields
from meshcast.experiments.explain.changeable_job import ChangeableJob
from meshcast.experiments.explain.fitting_changes import fitting_changes
from meshcast.experiments.search.space.fields import AUTO, FIELDS
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.job.program_rules import broken_rules
from meshcast.simulator.loading.load import load_job, set_field
from meshcast.simulator.report.peak_errors import FITS, FITS_AT_ALL
from tests.draws import drawn
from tests.experiments.advice.files import LAUNCHES, Launch, list_cases

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"
"""Launch files that people brought, which are beside some copies of the project."""

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": "dgx-h100:2",
    "batch": {"global": 32, "micro": 1, "sequence": 4096},
    "plan": {"tp": 4, "pp": 2, "recompute": "full"},
}


def advice_on(name: str) -> Advice:
    """Advice on a launch file of the current folder."""
    return advise(LAUNCHES[name].name, LAUNCHES[name].changes)


def plans_of(advice: Advice) -> list[AdvisedPlan]:
    return [*advice.changes, *advice.together, *([advice.best] if advice.best else [])]


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_is_proposed_runs_and_is_worth_what_is_said(name: str) -> None:
    advice = advice_on(name)
    now, before = advice.now, {rule.key for rule in broken_rules(advice.now.job)}
    fits_now = now.fit.probability >= FITS_AT_ALL
    least = min(FITS, now.fit.probability) if fits_now else FITS
    assert advice.changes and advice.best is not None
    for plan in plans_of(advice):
        assert not {rule.key for rule in broken_rules(plan.trial.job)} - before
        assert plan.trial.probability >= least * (1 - 1e-6)
        assert plan.settings, "in the words of the program"
        assert plan.gain == 1 - plan.trial.seconds / now.step_time
        saved = plan.trial.seconds - now.step_time
        assert math.isclose(sum(plan.terms.values()), saved, rel_tol=1e-9, abs_tol=1e-12)
        assert plan.gain > 0.005 or not fits_now
        assert plan.trial.forecast.step_time == meshcast.simulate(plan.trial.job).step_time
    for plan in advice.together:
        keys = {change.key for change in plan.changes}
        assert not plan.trial.numerics and len(keys) == len(plan.changes) > 1
        assert not any(change.idle & keys for change in plan.changes), "of what has no effect none is a part"
    ranks = [(plan.trial.numerics, -plan.gain / plan.effort) for plan in advice.changes]
    assert ranks == sorted(ranks)
    assert len({plan.changes[0].key for plan in advice.changes}) == len(advice.changes)


@pytest.mark.parametrize("name", LAUNCHES)
def test_together_they_are_no_slower_than_alone(name: str) -> None:
    advice = advice_on(name)
    alone = [plan for plan in advice.changes if not plan.trial.numerics]
    steps = [plan.trial.seconds for plan in (*alone, *advice.together)]
    assert advice.best is not None and advice.best.trial.seconds <= min(steps) + 0.005 * advice.now.step_time
    assert all(later.trial.seconds < earlier.trial.seconds for earlier, later in pairwise(advice.together))


def test_of_a_plan_that_does_not_fit_the_cheapest_changes_are_those_of_predict() -> None:
    job = {**JOB, "model": "llama3-70b", "cluster": "dgx-h100:4", "plan": {"tp": 4, "pp": 2}}
    advice, expected = advise(job), fitting_changes(meshcast.simulate(job)).fitting
    assert not advice.now.fits and [change.changes for change, _ in advice.fitting] == [
        change.changes for change in expected
    ]
    assert all(plan.trial.probability >= FITS for plan in plans_of(advice))


def test_engines_that_a_program_shards_with_come_along() -> None:
    """LLaMA-Factory shards by FSDP or DeepSpeed, which are another profile; DDP is what its file says."""
    advice = advice_on("does not fit")
    assert not advice.now.fits and advice.now.job.framework.name == "llama-factory"
    zero = next(plan for plan in advice.changes if plan.changes[0].key == "plan.zero")
    assert zero.trial.job.framework.name == "deepspeed" and "add deepspeed.zero_optimization.stage 2" in zero.settings


def test_numerics_are_marked_and_never_combined() -> None:
    changes = {plan.changes[0].key: plan for plan in advise(JOB).changes}
    assert {key for key, plan in changes.items() if plan.trial.numerics} <= {
        "precision.compute",
        "batch.global",
        "plan.schedule",
    }
    twice = changes["batch.global"]
    assert twice.trial.forecast.step_time > twice.trial.seconds == twice.trial.forecast.step_time / 2


def test_what_is_to_stay_stays() -> None:
    free, kept = advise(JOB), advise(JOB, keep=("plan.recompute", "batch"))
    keys = {change.key for plan in plans_of(free) for change in plan.changes}
    assert "plan.recompute" in keys
    changed = {field for plan in plans_of(kept) for change in plan.changes for field in change.fields}
    assert not {field for field in changed if field == "plan.recompute" or field.startswith("batch.")}


def test_a_plan_in_long_form_gets_the_advice_of_its_short_form() -> None:
    long = {**JOB, "plan": load_job(JOB).to_dict()["plan"]}
    for one, other in zip(advise(JOB).changes, advise(long).changes, strict=True):
        assert one.changes[0].fields == other.changes[0].fields
        assert math.isclose(one.trial.seconds, other.trial.seconds, rel_tol=1e-9)


def test_every_field_of_a_search_and_the_kernels_are_varied() -> None:
    base = ChangeableJob(load_job("moe.sh", LAUNCHES["experts"].changes))
    keys = {change.key for change in PlanNeighbours(base, settings=True).list_changes()}
    wanted = {
        "plan.tp",
        "plan.pp",
        "plan.ep",
        "plan.etp",
        "plan.zero",
        "plan.recompute",
        "plan.offload",
        "plan.ep_scheme",
    }
    assert wanted | {"batch.micro", "framework.set.overlap.dp", "precision.compute", LOSS} <= keys
    piped = ChangeableJob(load_job({**JOB, "plan": {"tp": 2, "pp": 4}}))
    keys = {change.key for change in PlanNeighbours(piped, settings=False).list_changes()}
    assert {"plan.schedule", "plan.order", "plan.sequence_parallel", "plan.cp"} <= keys


def search_same_fields(advice: Advice) -> float | None:
    """The shortest step that a search finds over the fields that the best changes together have changed; None where a
    search does not take them."""
    best = min((plan for plan in plans_of(advice) if not plan.trial.numerics), key=lambda plan: plan.trial.seconds)
    fields, job = merge_fields(best.changes), copy.deepcopy(best.trial.job.as_written)
    if fields is None or "mesh" in job["plan"]:
        return None
    for field in fields:
        if field in ("plan.zero", "plan.fsdp"):
            job["plan"].pop("fsdp", None)
            job["plan"]["zero"] = AUTO
        elif field in FIELDS:
            set_field(job, field, AUTO, field)
    if {"plan.schedule", "plan.chunks"} & fields.keys():
        job["plan"]["chunks"] = AUTO
    risk = 1 - (min(FITS, advice.now.fit.probability) if advice.now.fit.probability >= FITS_AT_ALL else FITS)
    try:
        found = meshcast.search(job, top=1, memory_risk=max(risk, 1e-3), workers=1, base=advice.now.job.folder)
    except PlanError:  # nothing is open: the changes are of settings that no search varies
        return None
    return found.best[0].report.step_time / best.trial.seconds if found.best else None


@pytest.mark.parametrize("name", drawn(list(LAUNCHES), keep=lambda name: name in ("megatron", "torchtitan")))
def test_the_best_together_are_within_3_percent_of_a_search(name: str) -> None:
    ratio = search_same_fields(advice_on(name))
    assert ratio is None or 0.97 <= ratio <= 1 + 1e-9


@pytest.mark.slow
@pytest.mark.skipif(not CASES.is_dir(), reason="the cases that people brought are not beside this copy")
def test_of_launch_files_that_people_brought_9_of_10_are_within_3_percent_of_a_search() -> None:
    ratios = [ratio for case in list_cases(CASES) if (ratio := compare_case(case)) is not None]
    assert len(ratios) >= 8 and sum(ratio >= 0.97 for ratio in ratios) >= 0.9 * len(ratios), ratios


def compare_case(case: Launch) -> float | None:
    """Returns how a search compares with the advice on a case; None where it is refused, or has no change."""
    try:
        advice = advise(case.name, case.changes)
    except MeshcastError:
        return None
    return search_same_fields(advice) if advice.best is not None else None


@pytest.mark.parametrize(
    ("job", "where"),
    [
        ({**JOB, "plan": {"stages": [{"tp": 8}, {"tp": 8}]}}, "plan.stages"),
        ({**JOB, "batch": {"micro": 1, "sequence": 4096, "lengths": [{"sequence": 128}]}}, "batch"),
        (
            {**JOB, "cluster": {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}},
            "cluster",
        ),
    ],
)
def test_jobs_that_no_search_takes_are_refused(job: dict[str, Any], where: str) -> None:
    with pytest.raises(MeshcastError) as refused:
        advise(job)
    assert where in str(refused.value)
