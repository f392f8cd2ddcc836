"""Calibrations from tables of measured kernels: for each GPU every cost model that its rows determine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import Calibration, format_of
from meshcast.simulator.costs.calibration.cost_models import KERNEL_MODELS
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.validation.calibration.fit import Fit, Name, fit
from meshcast.validation.calibration.kernels.predict import price, price_by
from meshcast.validation.calibration.kernels.sample import KernelSample
from meshcast.validation.calibration.tables.calibrated import (
    FEWEST,
    CalibrationResult,
    LibraryErrors,
    count_errors,
    sigmas_by_library,
    sigmas_of_all,
)
from meshcast.validation.calibration.tables.rows import RowForecasts
from meshcast.validation.calibration.tables.table import LibraryTable
from meshcast.validation.calibration.write import make_section

ORDER = (
    *("memory", "eager", "gemm", "gemm-fp8", "grouped", "attention", "dispatch", "combine", "prepare"),
    *("cpu-memory", "cpu-gemm", "cpu-attention"),
)
"""Sections in the order of their fits: casts and copies are parts of later ones."""

UNKNOWN = {"sigma": 0.0, "sigma_short": 0.0}
"""Sigmas before they are known."""

Pairs = Sequence[tuple[KernelSample, str]]
"""Samples with their sources."""


def names(tables: Sequence[LibraryTable]) -> list[str]:
    """The GPUs with rows that can be fitted, sorted."""
    return sorted({sample.gpu for table in tables for sample, _ in _select([table], "", "")})


def calibrate(
    calibration: Calibration, tables: Sequence[LibraryTable], gpu: str, leave_out: bool = True, prior: bool = False
) -> CalibrationResult:
    """The calibration of one GPU.

    calibration: of other GPUs. leave_out: also fit every section without each of its libraries. prior: coefficients
    that few rows determine stay near those of `calibration` for this GPU, its own or those that it borrows.
    """
    data: dict[str, Any] = {}
    errors: list[LibraryErrors] = []
    for section in ORDER:
        pairs = _select(tables, gpu, section)
        if not pairs:
            continue
        data[section] = _fit_section(calibration, gpu, data, section, pairs, prior)
        for library in sorted({sample.library for sample, _ in pairs}):
            errors.append(_library_errors(calibration, gpu, data, section, pairs, library, leave_out))
    return CalibrationResult(gpu, data, errors)


def _select(tables: Sequence[LibraryTable], gpu: str, section: str) -> list[tuple[KernelSample, str]]:
    """Samples that can be fitted, of one GPU and section or ("") of all."""
    pairs = [(sample, table.source(sample)) for table in tables for sample in table.samples if sample.library]
    pairs = [(s, source) for s, source in pairs if gpu in ("", s.gpu) and section in ("", s.operation)]
    counts: dict[tuple[str, ...], int] = {}
    for sample, _ in pairs:
        key = sample.gpu, sample.operation, sample.library
        counts[key] = counts.get(key, 0) + len(sample.index)
    return [(s, source) for s, source in pairs if counts[s.gpu, s.operation, s.library] >= FEWEST]


def _with_gpu(calibration: Calibration, gpu: str, data: Mapping[str, Any]) -> Calibration:
    """The calibration with `data` as the file of `gpu`."""
    return calibration.with_file(load("gpus", gpu).name, dict(data))


def _fit_section(
    calibration: Calibration, gpu: str, data: Mapping[str, Any], section: str, pairs: Pairs, prior: bool = False
) -> dict[str, Any]:
    """A section of the file whose other sections are `data`; prior: see `calibrate`."""
    samples, known, model = [sample for sample, _ in pairs], _with_gpu(calibration, gpu, data), KERNEL_MODELS[section]
    by = {sample: price_by(known, sample) for sample in samples}
    values = _known_values(calibration, gpu, section, samples) if prior else {}
    found = _fit(model, samples, lambda sample, one: by[sample](one).seconds, values)
    prices = [(sample, by[sample](found.make_model(model, sample.library))) for sample in samples]
    own = sigmas_by_library(prices)
    rows = {library: sum(len(s.index) for s in samples if s.library == library) for library in own}
    sources = {library: "; ".join(dict.fromkeys(o for s, o in pairs if s.library == library)) for library in own}
    formats = {sample.library: _format(sample) for sample in samples}
    unnamed = [_format(sample) for sample in samples if sample.tuned] or formats.values()
    made = make_section(model, found, own, dict.fromkeys(unnamed, UNKNOWN), rows, formats, sources)
    for sample in samples:
        if not sample.tuned:
            made["libraries"][sample.library]["tuned"] = False
    for form in made["unnamed"]:
        similar = [sample for sample in samples if _format(sample) == form]
        similar = [sample for sample in similar if sample.tuned] or similar
        made["unnamed"][form] = sigmas_of_all(
            _price_by_others(calibration, gpu, {**data, section: made}, section, similar)
        )
    return made


def _price_by_others(
    calibration: Calibration, gpu: str, data: Mapping[str, Any], section: str, samples: Sequence[KernelSample]
) -> list[tuple[KernelSample, RowForecasts]]:
    """Samples of one number format priced as kernels of an unnamed library: by the mean of the libraries of this format
    other than their own, or with their own where it is alone. data: of the file."""
    similar = {sample.library: data[section]["libraries"][sample.library] for sample in samples}
    prices = []
    for library in similar:
        others = {name: entry for name, entry in similar.items() if name != library} or similar
        known = _with_gpu(calibration, gpu, {**data, section: {**data[section], "libraries": others}})
        own = [sample for sample in samples if sample.library == library]
        prices += [(sample, price(known, sample, library="")) for sample in own]
    return prices


def _known_values(
    calibration: Calibration, gpu: str, section: str, samples: Sequence[KernelSample]
) -> dict[Name, float]:
    """Coefficients of a section as `calibration` has them for the GPU and the libraries of the samples."""
    known = coefficients(KERNEL_MODELS[section])
    found: dict[Name, float] = {}
    for sample in samples:
        model = calibration.kernel_model(load("gpus", gpu), section, sample.library, _format(sample)).model
        for name, one in known.items():
            found.setdefault((name, sample.library if one.of == "library" else None), float(getattr(model, name)))
    return found


def _fit(
    model: type,
    samples: Sequence[KernelSample],
    predict: Callable[[KernelSample, Any], np.ndarray],
    prior: Mapping[Name, float],
) -> Fit:
    """The fit of a cost model to all libraries.

    Kernels that were not tuned to their sizes say nothing of the GPU: their library coefficients are fitted afterwards.
    """
    tuned = [sample for sample in samples if sample.tuned]
    found = fit(model, tuned or samples, predict, prior=prior)
    libraries, errors = dict(found.libraries), dict(found.library_errors)
    for library in sorted({sample.library for sample in samples} - {*libraries}):
        rest = [sample for sample in samples if sample.library == library]
        held = {name: value for name, value in found.values.items() if name not in rest[0].own}
        more = fit(model, rest, predict, held=held, prior=prior)
        own = [name for name in rest[0].own if name in more.errors]
        libraries[library] = more.libraries[library] | {name: more.values[name] for name in own}
        errors[library] = more.library_errors[library] | {name: more.errors[name] for name in own}
    return Fit(found.values, found.errors, libraries, errors)


def _format(sample: KernelSample) -> str:
    return format_of(next((part.dtype for part in sample.parts if hasattr(part, "dtype")), "bf16"))


def _library_errors(
    calibration: Calibration,
    gpu: str,
    data: Mapping[str, Any],
    section: str,
    pairs: Pairs,
    library: str,
    leave_out: bool,
) -> LibraryErrors:
    """Errors of the rows of one library with its own coefficients and, where asked for, without having seen it."""
    own = [sample for sample, _ in pairs if sample.library == library]
    known = _with_gpu(calibration, gpu, data)
    seen = count_errors(own, [price(known, sample) for sample in own])
    others = [(sample, source) for sample, source in pairs if sample.library != library]
    blind: tuple[float | None, float | None] = None, None
    if leave_out and others:
        rest = {key: one for key, one in data.items() if key != section}
        made = _fit_section(calibration, gpu, rest, section, others)
        known = _with_gpu(calibration, gpu, {**rest, section: made})
        blind = count_errors(own, [price(known, sample, library="") for sample in own])[1:]
    return LibraryErrors(section, library, *seen, *blind)
