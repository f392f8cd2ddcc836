"""Calibrations from tables of measured kernels: for each GPU the coefficients of every law that its rows can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hardware import load
from simulator.costs.calibration.calibration import Calibration, format_of
from simulator.costs.calibration.cost_models import LAWS
from validation.calibration.fit import Fit, fit
from validation.calibration.kernels.predict import priced, pricing
from validation.calibration.kernels.sample import Sample
from validation.calibration.tables.calibrated import FEWEST, Calibrated, Known, errors, plain_spreads, spreads_of
from validation.calibration.tables.table import Table
from validation.calibration.write import section

ORDER = (
    *("memory", "gemm", "gemm-fp8", "grouped", "attention", "dispatch", "combine", "prepare"),
    *("cpu-memory", "cpu-gemm", "cpu-attention"),
)
"""Sections in the order of fits: casts and copies are parts of what comes later."""

NOTHING = {"spread": 0.0, "spread_short": 0.0}


def names(tables: Sequence[Table]) -> list[str]:
    """The GPUs with rows that can be fitted, sorted."""
    return sorted({sample.gpu for table in tables for sample, _ in _fitting([table], "", "")})


def calibrate(calibration: Calibration, tables: Sequence[Table], gpu: str, leave_out: bool = True) -> Calibrated:
    """The calibration of one GPU.

    calibration: of other GPUs. leave_out: also fit every section without each of its libraries.
    """
    data: dict[str, Any] = {}
    told: list[Known] = []
    for name in ORDER:
        pairs = _fitting(tables, gpu, name)
        if not pairs:
            continue
        data[name] = _fitted(calibration, gpu, data, name, pairs)
        for library in sorted({sample.library for sample, _ in pairs}):
            told.append(_known(calibration, gpu, data, name, pairs, library, leave_out))
    return Calibrated(gpu, data, told)


def _fitting(tables: Sequence[Table], gpu: str, name: str) -> list[tuple[Sample, str]]:
    """The samples that can be fitted, with their sources; of one GPU and section, or ("") of all."""
    pairs = [(sample, table.source(sample)) for table in tables for sample in table.samples if sample.library]
    pairs = [(s, source) for s, source in pairs if gpu in ("", s.gpu) and name in ("", s.operation)]
    counts: dict[tuple[str, ...], int] = {}
    for sample, _ in pairs:
        key = sample.gpu, sample.operation, sample.library
        counts[key] = counts.get(key, 0) + len(sample.index)
    return [(s, source) for s, source in pairs if counts[s.gpu, s.operation, s.library] >= FEWEST]


def _with_gpu(calibration: Calibration, gpu: str, data: dict[str, Any]) -> Calibration:
    """`data` as the file of `gpu`."""
    return calibration.with_file(load("gpus", gpu).name, dict(data))


def _fitted(
    calibration: Calibration, gpu: str, data: dict[str, Any], name: str, pairs: Sequence[tuple[Sample, str]]
) -> dict[str, Any]:
    """The section `name` of a file whose other sections are `data`."""
    samples, known = [sample for sample, _ in pairs], _with_gpu(calibration, gpu, data)
    by = {sample: pricing(known, sample) for sample in samples}
    found = _fit(LAWS[name], samples, lambda sample, law: by[sample](law).seconds)
    prices = [(s, by[s](found.law(LAWS[name], s.library))) for s in samples]
    own = {library: spreads_of([pair for pair in prices if pair[0].library == library]) for library in found.libraries}
    rows = {library: sum(len(s.index) for s in samples if s.library == library) for library in own}
    sources = {library: "; ".join(dict.fromkeys(o for s, o in pairs if s.library == library)) for library in own}
    formats = {s.library: _format(s) for s in samples}
    made = section(LAWS[name], found, own, dict.fromkeys(formats.values(), NOTHING), rows, formats, sources)
    for sample in samples:
        if not sample.tuned:
            made["libraries"][sample.library]["tuned"] = False
    known = _with_gpu(calibration, gpu, data | {name: made})
    for form in made["unnamed"]:
        alike = [sample for sample in samples if _format(sample) == form]
        alike = [sample for sample in alike if sample.tuned] or alike
        made["unnamed"][form] = plain_spreads([(sample, priced(known, sample, library="")) for sample in alike])
    return made


def _fit(law: type, samples: Sequence[Sample], predict: Callable[[Sample, Any], np.ndarray]) -> Fit:
    """Kernels that nobody tuned tell nothing of the GPU: their own coefficients are fitted afterwards."""
    tuned = [sample for sample in samples if sample.tuned]
    found = fit(law, tuned or samples, predict)
    rest = [sample for sample in samples if sample.library not in found.libraries]
    if not rest:
        return found
    more = fit(law, rest, predict, held=found.values)
    libraries = found.libraries | more.libraries
    return Fit(found.values, found.errors, libraries, found.library_errors | more.library_errors)


def _format(sample: Sample) -> str:
    return format_of(next((part.dtype for part in sample.parts if hasattr(part, "dtype")), "bf16"))


def _known(
    calibration: Calibration,
    gpu: str,
    data: dict[str, Any],
    name: str,
    pairs: Sequence[tuple[Sample, str]],
    library: str,
    leave_out: bool,
) -> Known:
    own = [sample for sample, _ in pairs if sample.library == library]
    known = _with_gpu(calibration, gpu, data)
    seen = errors(own, [priced(known, sample) for sample in own])
    others = [(sample, source) for sample, source in pairs if sample.library != library]
    blind: tuple[float | None, float | None] = None, None
    if leave_out and others:
        rest = {key: one for key, one in data.items() if key != name}
        known = _with_gpu(calibration, gpu, rest | {name: _fitted(calibration, gpu, rest, name, others)})
        blind = errors(own, [priced(known, sample, library="") for sample in own])[1:]
    return Known(name, library, *seen, *blind)
