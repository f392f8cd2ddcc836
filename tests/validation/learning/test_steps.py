"""Learning from measured steps: of logs, tables and published runs; and that it harms by no more than chance."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.step_posterior import SIZES, MeasuredStep, StepFeatures, shipped_prior
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.loading.load import load_job
from meshcast.validation.learning.files import read_evidence
from meshcast.validation.learning.learn import learn_files
from meshcast.validation.learning.step_prior import fit_prior
from meshcast.validation.learning.step_sources import forecast_sources, group_sources
from meshcast.validation.learning.step_trials import KNOWN, POINT, draw_trials, try_sources
from meshcast.validation.learning.steps import TimedJob, learn_posterior
from meshcast.validation.published.rows import PublishedRun, read
from tests.experiments.diagnosis.written_logs import WrittenRun, megatron

SHIPPED = Calibration.shipped()
JOB = (
    "{model: {layers: 4, hidden: 1024, heads: 8, vocab: 1024, seq: 1024}, cluster: 'dgx-h100:1', "
    "batch: {global: 64, micro: 2}, plan: {tp: 2}}"
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def timed(path: Path, stated: Path | None = None) -> list[TimedJob]:
    evidence = read_evidence(path, load_job(stated).to_dict() if stated else None)
    assert isinstance(evidence, list)
    return evidence


def test_a_log_is_read_with_the_job_beside_it(job: Path) -> None:
    log = job.with_name("run.log")
    log.write_text(WrittenRun([9.0, 3.0, 3.0, *[0.5, 0.52, 0.51] * 4], samples=64).write(megatron))
    with pytest.raises(PlanError, match="which job ran"):
        timed(log)
    (by_name,) = timed(log, job)
    job.rename(log.with_suffix(".yaml"))
    (beside,) = timed(log)
    assert by_name.seconds == beside.seconds == 0.51 and beside.job.batch.total == 64


def test_tables_say_the_same_in_csv_and_yaml(job: Path) -> None:
    (table := job.with_name("steps.csv")).write_text("job,step_time_s,name,plan.tp\njob.yaml,0.5,first,4\n")
    stated = "steps: [{job: job.yaml, step_time_s: 0.5, name: first, set: {plan.tp: 4}}]"
    (document := job.with_name("steps.yaml")).write_text(stated)
    (csv,), (yaml,) = timed(table), timed(document)
    assert csv.seconds == yaml.seconds == 0.5 and csv.job == yaml.job and csv.name.endswith(": first")
    assert csv.job.to_dict()["plan"] != load_job(job).to_dict()["plan"]


def write_slow(job: Path, factor: float, scatter: float = 0.0, seed: int = 0) -> Path:
    """Writes steps of several plans that take so many times their forecast."""
    noise, rows = random.Random(seed), ["job,step_time_s,plan.tp,batch.micro"]
    for tp in (1, 2, 4, 8):
        for micro in (1, 2):
            plain = simulate(load_job(job, [f"plan.tp={tp}", f"batch.micro={micro}"])).step_time
            rows.append(f"job.yaml,{plain * factor * np.exp(noise.gauss(0, scatter)):.6g},{tp},{micro}")
    (path := job.with_name("slow.csv")).write_text("\n".join(rows))
    return path


def test_a_slow_machine_is_learnt_and_its_folder_goes_on(job: Path) -> None:
    out = job.parent / "mine"
    answer = learn_files([write_slow(job, 1.15, 0.01)], out, SHIPPED)
    assert answer["steps"]["confirmed"] and answer["steps"]["held_back"]["after"] < 0.04
    mine = Calibration.from_folder(out)
    unseen = load_job(job, ["plan.tp=4", "batch.micro=4"])
    plain, learnt = simulate(unseen), simulate(unseen, calibration=mine)
    assert 1.08 < learnt.step_time / plain.step_time < 1.15
    assert sum(learnt.parts.values()) == pytest.approx(learnt.step_time)
    low, high = learnt.interval_90
    assert low < 1.15 * plain.step_time < high and high / low < plain.interval_90[1] / plain.interval_90[0]
    # The same steps again take the place of those that are known: nothing counts twice.
    again = learn_files([job.with_name("slow.csv")], out, mine)
    assert again["steps"] == answer["steps"]


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_scatter_around_the_forecast_change_nothing(job: Path, seed: int) -> None:
    answer = learn_files([write_slow(job, 1.0, 0.04, seed)], job.parent / "mine", SHIPPED)
    assert max(abs(step["change"]) for step in answer["steps"]["steps"]) < 0.005


def test_steps_of_several_sources_are_refused(job: Path) -> None:
    rows = [{"job": "job.yaml", "step_time_s": simulate(load_job(job)).step_time, "source": name} for name in "ab"]
    (path := job.with_name("steps.yaml")).write_text(json.dumps({"steps": rows}))
    with pytest.raises(PlanError, match="one program and machine"):
        learn_files([path], job.parent / "mine", SHIPPED)


def draw_sources(sources: int, steps: int, seed: int = 0) -> list[list[MeasuredStep]]:
    """Draws sources whose steps have a bias of 10 % and noise of 2 %."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(sources):
        bias = rng.normal(0, 0.1)
        ratios = bias + rng.normal(0, 0.02, steps)
        gemm = rng.uniform(0.3, 0.9, steps)
        features = [
            StepFeatures({"gemm bf16": g, "host": 1 - g}, str(i), dict.fromkeys(SIZES, 1.0)) for i, g in enumerate(gemm)
        ]
        drawn.append(
            [MeasuredStep("", "", f, float(np.exp(r)), 1.0) for f, r in zip(features, ratios.tolist(), strict=True)]
        )
    return drawn


def test_the_prior_of_drawn_sources_is_that_of_the_draw() -> None:
    prior = fit_prior(draw_sources(25, 12))
    whole = prior.source**2 + 0.36 * prior.gemm**2 + 0.16 * prior.host**2
    assert whole**0.5 == pytest.approx(0.1, rel=0.35)
    assert (prior.noise**2 * 2 + prior.model**2 + prior.like**2) ** 0.5 == pytest.approx(0.02, rel=0.5)


def test_learning_is_judged_on_rows_that_it_has_not_seen() -> None:
    (steps,) = draw_sources(1, 8)
    learnt = learn_posterior(steps)
    assert learnt.after is not None and learnt.after < learnt.before
    assert learn_posterior(steps[:3]).after is None


def test_sources_are_tried() -> None:
    path = Path(__file__).parents[2] / "data" / "published_runs.jsonl"
    runs = [run for run in read(path) if isinstance(run, PublishedRun) and run.id.startswith("bloom-")]
    sources = group_sources([*forecast_sources(runs, 1)])
    answer = try_sources({"bloom": (sources["bloom"] * 10)[:10]}, lambda every, _, __: every)
    (row,) = answer["sources"]
    assert row["steps"] == 10 and {*row["errors"]} == {"0", "1", "2", "5"} and answer["draws"]["draws"] == 0


@pytest.mark.slow
def test_learning_from_steps_never_hurts() -> None:
    """200 draws of published sources, each told as a stranger would: where enough steps are held back to know their
    median error, it is no higher than without learning in 95 % of the draws, and never by more than a point."""
    folder = Path(__file__).resolve().parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("draws need all published runs (shared beside the checkout)")
    runs = [run for run in read(folder / "published_runs.jsonl") if isinstance(run, PublishedRun) and run.step_time]
    by_source: dict[str, list[PublishedRun]] = {}
    for run in runs:
        by_source.setdefault(run.source, []).append(run)
    rng, rises = random.Random(60), list[float]()
    for name, of_source in by_source.items():
        if len(of_source) < 2 * KNOWN:
            continue
        drawn = rng.sample(of_source, min(len(of_source), 3 * KNOWN))
        steps = group_sources([*forecast_sources(drawn)])[name]
        trials = [trial for trial in draw_trials(name, steps, shipped_prior(), rng) if trial.held >= KNOWN]
        rises += [trial.after - trial.before for trial in rng.sample(trials, min(len(trials), 40))]
    rises = rng.sample(rises, 200)
    worse = [rise for rise in rises if rise > 0]
    assert len(worse) <= 0.05 * len(rises) and max(rises) < POINT, sorted(worse)
