"""Learns a calibration from files of measurements, section by section, and writes what unseen rows confirm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.calibration.cost_models import KERNEL_MODELS
from meshcast.validation.calibration import write
from meshcast.validation.calibration.collectives import tables as collectives
from meshcast.validation.calibration.kernels import tables as kernels
from meshcast.validation.learning.files import KINDS, read_evidence
from meshcast.validation.learning.posterior import Learnt, learn
from meshcast.validation.learning.tables import list_evidence, make_evidence

Job = Mapping[str, object]
"""A job in long form."""

LearnAnswer = dict[str, Any]
"""What ``meshcast learn --json`` prints: see `learn_files`."""

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

    calibration: the prior, what is in use now. job: whose cluster nccl-tests ran on.
    Returns `sections`, each with its rows, errors and moved coefficients, and the `files` written. A file is written
    whole after each of its sections, so that an interrupt leaves what was learnt until then.
    Raises PlanError for a file that nothing can be learnt from.
    """
    tables = [read_evidence(path, job) for path in paths]
    groups = list_evidence(tables)
    if not groups:
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
    return {"sections": [*map(_describe, learnt)], "files": [*_list_written(learnt, out)]}


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
