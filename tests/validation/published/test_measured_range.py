"""What published runs have measured: envelope of utilisation, combinations of plans, sigmas of fields outside."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from meshcast.hardware.load import load
from meshcast.simulator import load_job, simulate
from meshcast.simulator.costs.kernels.roofline import peak
from meshcast.simulator.models.flops import needed_flops
from meshcast.simulator.report.report import Report
from meshcast.validation.published.measured_range import combinations
from meshcast.validation.published.measured_range.combinations import MeasuredPlan, condense, find_nearest
from meshcast.validation.published.measured_range.distance import SIGMAS, distance_from_measured, widened_interval
from meshcast.validation.published.measured_range.envelope import (
    LARGE,
    class_of,
    format_of,
    published_envelope,
    read_envelope,
)
from meshcast.validation.published.measured_range.excess import beyond_envelope, compare_terms, describe_envelope
from meshcast.validation.published.measured_range.plan_fields import (
    NAMED,
    NUMBERS,
    PlanFields,
    TrainingTask,
    fields_of_plan,
)
from meshcast.validation.published.measured_range.survey import survey
from meshcast.validation.published.rows import PublishedRun, read, read_shipped
from tools.data.measured_range import write_tables
from tools.data.sigmas import HeldRun, cover, fit_sigmas, fit_together, format_fit, hold_runs

PUBLISHED = Path(__file__).resolve().parents[4] / "shared" / "data" / "published_runs.jsonl"


def gpt3(gpus: int = 1024, **plan: Any) -> dict[str, Any]:
    chosen = {"tp": 8, "pp": 4, "schedule": "interleaved-1f1b", "chunks": 3, "zero": 0, "recompute": "selective"} | plan
    return {
        "model": "gpt3-175b",
        "cluster": {"gpu": "a100-sxm-80", "gpus": gpus, "gpus_per_node": 8},
        "batch": {"global": 1536, "micro": 1, "sequence": 2048},
        "framework": "megatron-lm-2021",
        "plan": chosen,
    }


def optimistic() -> dict[str, Any]:
    """Async tensor parallelism, 24 chunks and micro-batches of four sequences: nothing is exposed in its forecast."""
    schemes = [
        {"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 24},
        {"use": "data/zero-1", "over": "dp"},
        {"use": "tensor/async-tp"},
        {"use": "tensor/megatron-sp", "over": "tp"},
    ]
    job = gpt3() | {"plan": {"mesh": {"pp": 4, "dp": 32, "tp": 8}, "schemes": schemes}, "framework": "megatron-core"}
    return job | {"batch": {"global": 1536, "micro": 4, "sequence": 2048}}


@pytest.fixture(scope="module")
def winner() -> Report:
    return simulate(optimistic())


# ----------------------------------------------------------------------------------------------------- envelope


def test_entries_have_a_source_and_their_own_keys() -> None:
    entries = read_envelope()
    assert len({(entry.gpu, entry.number, entry.kind) for entry in entries}) == len(entries) > 30
    gpus = {"a100-sxm-80", "h100-sxm", "h200-sxm", "h800-sxm", "b200-sxm", "gb200", "gb300"}
    assert gpus <= {entry.gpu for entry in entries}
    for entry in entries:
        for run in filter(None, (entry.best, entry.best_causal, entry.large)):
            assert run.source and run.job["id"] == run.run
            assert 0.05 < run.causal < run.mfu < 1 and run.hfu < 1
            assert run.mfu <= entry.best.mfu
        assert entry.large is None or entry.large.gpus >= LARGE


def test_an_entry_is_the_measured_step_with_our_flops() -> None:
    """MFU from the row's own step time, and the FLOPs and peaks of the job: no forecast takes part."""
    if not PUBLISHED.exists():
        pytest.skip("the published runs are not here")
    steps = {run.id: run.step_time for run in read(PUBLISHED) if isinstance(run, PublishedRun)}
    for entry in read_envelope()[::6]:
        job, seconds = load_job(entry.best.job), steps[entry.best.run]
        assert (format_of(job), class_of(job), job.cluster.gpus) == (
            entry.number,
            entry.kind,
            entry.best.gpus,
        )
        assert seconds and job.batch.total and job.batch.sequence
        flops = needed_flops("palm", job.model, job.batch.sequence, job.adapters) * job.batch.total * job.batch.sequence
        rate = peak(load("gpus", entry.gpu), entry.number)
        assert entry.best.mfu == pytest.approx(flops / seconds / rate / job.cluster.gpus, abs=1e-4)


def test_the_envelope_of_a_job() -> None:
    few, many = (published_envelope(load_job(gpt3(gpus))) for gpus in (64, 1024))
    assert few is not None and many is not None
    assert (few.large, many.large, few.borrowed) == (False, True, False)
    assert many.best.gpus >= LARGE and many.mfu < few.mfu
    assert "a100-sxm-80, bf16, dense" in str(few)
    assert describe_envelope(many)["mfu"] == {"palm": many.mfu, "causal": many.causal}


def test_a_gpu_without_runs_borrows_those_of_its_architecture() -> None:
    job = gpt3(64) | {"cluster": {"gpu": "h800-sxm", "gpus": 64, "gpus_per_node": 8}, "framework": "megatron-core"}
    found = published_envelope(load_job(job))
    assert found is not None and found.borrowed and found.gpu == "h100-sxm" and "borrowed" in str(found)
    assert published_envelope(load_job(job | {"cluster": {"gpu": "v100-sxm2-32", "gpus": 64}})) is None


# ------------------------------------------------------------------------------------------------------- beyond


def test_terms_add_up_to_the_difference(winner: Report) -> None:
    found = beyond_envelope(winner)
    assert found is not None and found.excess > 0.1 and found.envelope.large
    assert found.excess == pytest.approx(
        min(winner.mfu["palm"] / found.envelope.mfu, winner.mfu["causal"] / found.envelope.causal) - 1
    )
    assert sum(term.saved for term in found.terms) == pytest.approx(1 / found.forecast_mfu - 1 / found.mfu)
    assert [term.saved for term in found.terms] == sorted((term.saved for term in found.terms), reverse=True)
    sentence = str(found)
    assert sentence.count("instead of") == 3 and found.envelope.best.run in sentence
    assert "tensor-parallel communication takes 0.0%" in sentence
    assert f"is {100 * (found.mfu - found.envelope.mfu):.1f} points beyond the best published one" in sentence


def test_a_forecast_within_the_envelope_is_not_beyond() -> None:
    assert beyond_envelope(simulate(gpt3(recompute="full"))) is None


def test_equal_forecasts_have_no_differences(winner: Report) -> None:
    assert all(term.saved == pytest.approx(0, abs=1e-12) for term in compare_terms(winner, winner))


# ------------------------------------------------------------------------------------------------- combinations

TASK = TrainingTask("ampere", "megatron-2021", "dense")
PLAIN = PlanFields("tensor/megatron", "", "pipeline/1f1b", "", "", "data/ddp", 8, 1, 1, 1, 2048, 512)


def measured(source: str, **fields: Any) -> MeasuredPlan:
    return MeasuredPlan(TASK, replace(PLAIN, **fields), source)


def test_combinations_condense_numbers_to_ranges() -> None:
    known = condense([measured("a"), measured("b", gpus=64, tp=2), measured("a", schedule="pipeline/gpipe")])
    assert [plan.runs for plan in known] == [2, 1] and known[0].sources == ("a", "b")
    assert known[0].list_outside(replace(PLAIN, gpus=256, tp=4)) == []
    assert known[0].list_outside(replace(PLAIN, gpus=1024, chunks=2)) == ["chunks", "gpus"]
    nearest, outside = find_nearest(replace(PLAIN, schedule="pipeline/gpipe", gpus=8), known)
    assert (nearest.names, outside) == (known[1].names, ["gpus"])


def test_the_table_is_read_as_it_is_written() -> None:
    every = combinations.read_combinations()
    assert tuple(combinations._read(combinations.write_entry(known)) for known in every) == every
    for known in every:
        assert known.sources and len(known.names) == len(NAMED) and len(known.ranges) == len(NUMBERS)
        assert all(low <= high for low, high in known.ranges)


def test_fields_of_a_plan(winner: Report) -> None:
    (fields,) = fields_of_plan(winner.play.plan)
    assert asdict(fields) == {
        **{"tensor": "tensor/megatron", "tensor_overlap": "tensor/async-tp", "schedule": "pipeline/interleaved-1f1b"},
        **{"context": "", "experts": "", "sharding": "data/zero-1", "tp": 8, "chunks": 24, "cp": 1, "ep": 1},
        **{"microbatch_tokens": 8192, "gpus": 1024},
    }


# ----------------------------------------------------------------------------------------------------- distance


def test_a_published_plan_is_measured() -> None:
    run = next(run for run in read_shipped() if run.id == "korthikanti-175b-selective")
    surveyed = survey(run)
    assert surveyed is not None
    report = simulate(surveyed.job)
    distance = distance_from_measured(report.play.plan)
    assert distance.measured and distance.sigma == 0 and str(distance).startswith("measured:")
    assert widened_interval(report, distance) == pytest.approx(report.interval_90)


def test_a_plan_that_nobody_has_run(winner: Report) -> None:
    distance = distance_from_measured(winner.play.plan)
    assert not distance.measured and {"program", "tensor_overlap", "chunks"} <= set(distance.outside)
    assert distance.sigma == pytest.approx(math.hypot(*(SIGMAS.get(field, 0.0) for field in distance.outside)))
    assert distance.sigma >= SIGMAS["schedule"]
    assert "overlap of tensor-parallel communication tensor/async-tp (measured: none)" in str(distance)
    (low, high), (wide_low, wide_high) = winner.interval_90, widened_interval(winner, distance)
    assert wide_low < low < winner.step_time < high < wide_high


def test_an_architecture_without_runs() -> None:
    job = gpt3(64) | {"cluster": {"gpu": "v100-sxm2-32", "gpus": 64, "gpus_per_node": 8}}
    job["precision"] = {"compute": "fp16"}
    distance = distance_from_measured(simulate(job).play.plan)
    assert distance.nearest is None and not distance.measured and "nobody has published" in str(distance)
    assert distance.sigma == pytest.approx(math.hypot(*SIGMAS.values()))


# ------------------------------------------------------------------------------------------------------- sigmas


def draw(extra: float) -> list[HeldRun]:
    """Runs of eight sources, half of them with a schedule outside, whose errors have a further sigma `extra`."""
    noise = np.random.default_rng(7).normal(size=(2, 800)).T.tolist()
    return [
        HeldRun(
            f"s{number % 8 // 2}{number % 2}",
            0.08 * usual + extra * more * (number % 2),
            0.08,
            ("schedule",) if number % 2 else (),
        )
        for number, (usual, more) in enumerate(noise)
    ]


def test_a_wider_error_is_found() -> None:
    (fit,) = fit_sigmas(draw(0.1))
    assert fit.kept and fit.sigma == pytest.approx(0.1, abs=0.02) and fit.least <= fit.sigma <= fit.most
    assert (fit.runs, fit.sources) == (400, 4) and abs(fit.bias) < 3 * fit.bias_error
    together = fit_together(draw(0.1), ["schedule"])
    before, after = cover(draw(0.1), together)
    assert together["schedule"] == pytest.approx(fit.sigma) and before < 0.8 < after
    assert "pipeline schedule" in format_fit(draw(0.1)) and "Kept" in format_fit(draw(0.1))


def test_equal_errors_need_no_wider_interval() -> None:
    (fit,) = fit_sigmas(draw(0.0))
    assert not fit.kept and fit.sigma < 0.03


def test_tables_of_two_runs(tmp_path: Path) -> None:
    runs = [run for run in read_shipped() if run.id in ("korthikanti-22b-full", "korthikanti-22b-selective")]
    surveyed = [answer for run in runs if (answer := survey(run)) is not None]
    assert len(surveyed) == 2 and hold_runs(surveyed) == []  # of one source
    write_tables(surveyed, tmp_path)
    (entry,) = yaml.safe_load((tmp_path / "envelope.yaml").read_text("utf-8"))
    assert entry["best"]["run"] == max(surveyed, key=lambda run: run.mfu).id and entry["runs"] == 2
    assert "table 5" in entry["best"]["source"]
    (job,) = (json.loads(line) for line in (tmp_path / "envelope_jobs.jsonl").read_text("utf-8").splitlines())
    assert job["id"] == entry["best"]["run"]
    (combination,) = yaml.safe_load((tmp_path / "combinations.yaml").read_text("utf-8"))
    assert (combination["tp"], combination["runs"], combination["gpus"]) == (8, 2, 8)
