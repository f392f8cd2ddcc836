"""Learns a calibration from files of measurements, section by section, and writes what unseen rows confirm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.calibration.check import LEARNT_STEPS
from meshcast.simulator.costs.calibration.cost_models import KERNEL_MODELS
from meshcast.simulator.costs.step_posterior import MeasuredStep, write_posterior
from meshcast.validation.calibration import write
from meshcast.validation.calibration.collectives import tables as collectives
from meshcast.validation.calibration.kernels import tables as kernels
from meshcast.validation.calibration.write import round_digits
from meshcast.validation.learning.files import KINDS, read_evidence
from meshcast.validation.learning.posterior import Learnt, learn
from meshcast.validation.learning.steps import LearntSteps, TimedJob, describe_steps, forecast_timed, learn_posterior
from meshcast.validation.learning.tables import list_evidence, make_evidence

Job = Mapping[str, object]
"""A job in long form."""

LearnAnswer = dict[str, Any]
"""What ``meshcast learn --json`` prints: see `learn_files`."""

HEAD_OF_STEPS = (
    "# Measured steps beside their forecasts, by meshcast learn; what they say of others follows from these rows.\n"
)

Track = Callable[..., Iterable[Any]]
"""Shows progress: takes what is gone through, its number, and what it is."""


def learn_files(
    paths: Sequence[Path],
    out: Path,
    calibration: Calibration,
    job: Job | None = None,
    track: Track = lambda every, _, __: every,
) -> LearnAnswer:
    """Learns from all files together and writes the files of a calibration into `out`.

    calibration: the prior, what is in use now. job: that logs are of, or whose cluster nccl-tests ran on.
    Returns `sections`, each with its rows, errors and moved coefficients, what `steps` say (`describe_steps`; None
    without any), and the `files` written. A file is written whole after each of its sections, so that an interrupt
    leaves what was learnt until then. Steps come last: they are held against forecasts by what tables have taught.
    Raises PlanError for a file that nothing can be learnt from.
    """
    evidence = [read_evidence(path, job) for path in paths]
    tables = [table for table in evidence if not isinstance(table, list)]
    timed = [each for steps in evidence if isinstance(steps, list) for each in steps]
    known = calibration.step_posterior
    if tables and known is not None:
        rule = "it has learnt from steps, whose forecasts these tables would change"
        raise PlanError("--calibration", rule, "Learn from the tables without it, and from the steps again")
    groups = list_evidence(tables)
    if not groups and not timed:
        rule = "no row can be priced, or none names its library in the column source"
        raise PlanError(
            ", ".join(map(str, paths)), rule, f"meshcast validate says why rows are refused; learnt: {KINDS}"
        )
    learnt: list[Learnt] = []
    with np.errstate(all="ignore"):
        for file, section, pairs in track(groups, len(groups), "sections"):
            result = learn(make_evidence(calibration, file, section, pairs))
            learnt.append(result)
            if result.data:
                merged = {**calibration.sections(result.file), section: dict(result.data)}
                calibration = calibration.with_file(result.file, merged)
                out.mkdir(exist_ok=True)
                write.write(out / f"{result.file}.yaml", _find_title(result.file, section), merged)
    sections, files, described = [*map(_describe, learnt)], [*_list_written(learnt, out)], None
    if timed:
        steps = _learn_steps(timed, known.rows if known is not None else (), calibration)
        described = describe_steps(steps)
        files.append(_write_steps(steps, out))
    return {"sections": sections, "steps": described, "files": files}


def _learn_steps(timed: Sequence[TimedJob], known: Sequence[MeasuredStep], calibration: Calibration) -> LearntSteps:
    """Returns what steps say, with those that were learnt from before; of two with the same name the new one.

    Raises PlanError for steps of several sources: what one says is not so of another.
    """
    new = forecast_timed(timed, calibration)
    names = {step.name for step in new}
    steps = [*(step for step in known if step.name not in names), *new]
    if len(sources := dict.fromkeys(step.source for step in steps)) > 1:
        rule = "steps are learnt from for one program and machine at a time"
        raise PlanError("FILES", rule, "Name the steps of one source, and a calibration of its own", ", ".join(sources))
    return learn_posterior(steps)


def _write_steps(steps: LearntSteps, out: Path) -> str:
    """Writes what was learnt from steps; returns the name of the file."""
    file, data = out / f"{LEARNT_STEPS}.yaml", write_posterior(steps.posterior)
    held_back = {"before": round_digits(steps.before), "after": round_digits(steps.after or 0.0)}
    out.mkdir(exist_ok=True)
    checked = {"held_back": held_back} if steps.after is not None else {}
    content = yaml.safe_dump({"steps": checked | data}, default_flow_style=None, sort_keys=False, width=200)
    write_file(file, HEAD_OF_STEPS + content)
    return str(file)


def _find_title(file: str, section: str) -> str:
    try:
        return kernels.title(file) if section in KERNEL_MODELS else collectives.title(file)
    except PlanError:
        return file


def _describe(learnt: Learnt) -> LearnAnswer:
    held_back = {"before": learnt.before, "after": learnt.after}
    return {
        "hardware": learnt.file,
        "section": learnt.section,
        "rows": learnt.rows,
        "held_back": held_back,
        "coefficients": [asdict(move) for move in learnt.moves],
    }


def _list_written(learnt: Sequence[Learnt], out: Path) -> Iterator[str]:
    yield from dict.fromkeys(str(out / f"{result.file}.yaml") for result in learnt if result.data)
