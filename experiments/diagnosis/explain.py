"""Explains a run: `meshcast.explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.explanation import Explanation, describe_surplus, find_causes, find_patterns
from meshcast.experiments.diagnosis.questions import list_questions
from meshcast.experiments.diagnosis.ranks import compare_ranks
from meshcast.experiments.diagnosis.steps import measure_steps
from meshcast.hardware.documents.input_file import TRACE as LARGE
from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.errors import PlanError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.formats import kineto
from meshcast.simulator.formats.files import lines, text
from meshcast.simulator.formats.gpu_samples import holds_samples, read_samples
from meshcast.simulator.formats.logs.read import read_log
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job, read_job
from meshcast.simulator.report.report import Report
from meshcast.validation.measurements.import_nccl_tests import import_nccl_tests
from meshcast.validation.measurements.import_training_log import step_seconds
from meshcast.validation.measurements.measurement import Measurement

LOG, TRACE, SAMPLES, LINKS = "training log", "trace", "samples of GPUs", "nccl-tests"
"""Kinds of files."""

WHICH = "Name training logs, traces of torch's profiler, output of nccl-tests or samples of nvidia-smi"

TESTS = ("nccl-tests version", "Collective test starting", "out-of-place", "nThread")
"""Words by which output of nccl-tests is known."""


class ShownExplanation(Explanation):
    """`Explanation` that shows itself in notebooks as the page of ``meshcast explain``."""

    def _repr_html_(self) -> str:
        from meshcast.experiments.diagnosis.page import page
        from meshcast.experiments.render.terminal.forecast import to_html

        return to_html(page(self))


def explain(
    files: str | Path | Iterable[str | Path],
    job: str | Path | SomeFields | None = None,
    changes: str | Iterable[str] | SomeFields = (),
    *,
    skip: int | None = None,
    rank: int | None = None,
    calibration: Calibration | None = None,
) -> Explanation:
    """Returns why a run is slower than its forecast, with the evidence for every cause.

    files: of the run: at most one training log; traces of torch's profiler, one of each rank; output of nccl-tests;
        samples of GPUs of nvidia-smi. What each is follows from its content.
    job: path of its launch file or job file, or the mapping of a job; None: nothing is forecast, and traces are
        refused.
    changes: to the job, such as ``cluster=dgx-h100:4``.
    skip: lines of the log to leave out; None: those until the steps settle.
    rank: of a trace that does not record its own.
    calibration: the coefficients of all costs; by default those that ship with meshcast.

    Raises PlanError for a file that is none of these, and what `load_job` raises.
    """
    loaded = load_job(job, changes) if job is not None else None
    listed = [changes] if isinstance(changes, str) else [*changes] if not isinstance(changes, Mapping) else []
    source = job if isinstance(job, str | Path) else None
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    return explain_job(
        paths,
        loaded,
        Path(source) if source is not None else None,
        listed,
        skip=skip,
        rank=rank,
        calibration=calibration,
    )


def explain_job(
    files: Sequence[Path],
    job: Job | None,
    source: Path | None = None,
    changes: Sequence[str] = (),
    *,
    skip: int | None = None,
    rank: int | None = None,
    calibration: Calibration | None = None,
) -> Explanation:
    """Returns why a run of a job that is loaded is slower. source: the file of the job. changes: with which it was
    read; see `explain`."""
    if not files:
        raise PlanError("LOG", "missing", WHICH)
    kinds = [(file, find_kind(file)) for file in files]
    report = simulate(job, calibration=calibration) if job is not None else None
    evidence = _gather(kinds, report, source, changes, skip, rank)
    steps = evidence.steps
    questions = list_questions(steps, report) if steps is not None and report is not None else ()
    causes = find_causes(evidence)
    patterns = find_patterns(steps, causes) if steps is not None else ()
    notes = evidence.traced.notes if evidence.traced is not None else ()
    described = tuple((str(file), kind) for file, kind in kinds)
    explanation = ShownExplanation(described, evidence, causes, tuple(questions), patterns, notes)
    return replace(explanation, notes=(*notes, *describe_surplus(explanation)))


def find_kind(file: Path) -> str:
    """Returns what a file is, by its content. Raises PlanError for one that cannot be read."""
    if file.name.lower().endswith((".json", ".json.gz")):
        return TRACE if '"traceEvents"' in text(file, WHICH, LARGE) else LINKS
    rows = lines(file, WHICH)
    if holds_samples(rows):
        return SAMPLES
    if any(words in row for _, row in rows[:200] for words in TESTS):
        return LINKS
    return LOG


def _gather(
    kinds: Sequence[tuple[Path, str]],
    report: Report | None,
    source: Path | None,
    changes: Sequence[str],
    skip: int | None,
    rank: int | None,
) -> RunEvidence:
    """Returns what the files say. Raises PlanError for several logs, and for traces without a job."""
    logs, traces, samples, links = (
        [file for file, kind in kinds if kind == wanted] for wanted in (LOG, TRACE, SAMPLES, LINKS)
    )
    if len(logs) > 1:
        raise PlanError("LOG", "it is a second training log: one run is explained", "Name one log", str(logs[1]))
    if traces and report is None:
        raise PlanError("--job", "a trace is compared with the job that ran", "Name its file: --job job.yaml")
    log = read_log(logs[0]) if logs else None
    steps = None
    if log is not None:
        tokens, gpus, samples_of_step = None, None, None
        if report is not None:
            tokens, gpus, samples_of_step = report.tokens, report.job.cluster.gpus, report.job.batch.total
        steps = measure_steps(log, partial(step_seconds, tokens=tokens, gpus=gpus, samples=samples_of_step), skip)
    launch = read_job(source, changes).launch if source is not None else None
    return RunEvidence(
        report,
        launch.form if launch is not None else log.form if log is not None else "",
        launch.settings if launch is not None else {},
        _list_checkpoints(report, launch.checkpoints if launch is not None else {}),
        steps,
        compare_ranks([kineto.read(file) for file in traces], report, rank) if traces and report is not None else None,
        tuple(sample for file in samples for sample in read_samples(file)),
        tuple(_read_links(file, report) for file in links),
    )


def _list_checkpoints(report: Report | None, stated: SomeFields) -> SomeFields:
    """Returns the checkpoints of a run, as the launch file or the job states them."""
    written = report.job.as_written.get("run", {}) if report is not None else {}
    of_job = written.get("checkpoints", {}) if isinstance(written, Mapping) else {}
    return stated or (of_job if isinstance(of_job, Mapping) else {})


def _read_links(file: Path, report: Report | None) -> Measurement:
    return import_nccl_tests(file, report.job.to_dict() if report is not None else None)
