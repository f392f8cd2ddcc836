"""Calibrations from tables of measured kernels: for each GPU every cost model that its rows determine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import Calibration, format_of
from meshcast.simulator.costs.calibration.cost_models import KERNEL_MODELS
from meshcast.simulator.costs.coefficients import coefficients
from meshcast.validation.calibration.fit import Fit, Name, fit, fit_further
from meshcast.validation.calibration.kernels.predict import price, price_by
from meshcast.validation.calibration.kernels.sample import KernelSample
from meshcast.validation.calibration.tables.calibrated import (
    MIN_ROWS,
    CalibrationResult,
    LibraryErrors,
    make_section,
    pair_sources,
    sigmas_by_library,
    sigmas_of_all,
)
from meshcast.validation.calibration.tables.rows import RowForecasts, of_library
from meshcast.validation.calibration.tables.table import LibraryTable

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
    """Returns the GPUs with rows that can be fitted, sorted."""
    return sorted({sample.gpu for table in tables for sample, _ in _select([table], "", "")})


def calibrate(
    calibration: Calibration, tables: Sequence[LibraryTable], gpu: str, leave_out: bool = True, prior: bool = False
) -> CalibrationResult:
    """Calibrates a GPU.

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
    """Selects the samples that can be fitted, of a GPU and section or ("") of all."""
    counts: dict[tuple[str, ...], int] = {}
    pairs = []
    for sample, source in pair_sources(tables):
        if sample.library and gpu in ("", sample.gpu) and section in ("", sample.operation):
            key = sample.gpu, sample.operation, sample.library
            counts[key] = counts.get(key, 0) + len(sample.index)
            pairs.append((sample, source))
    return [(s, source) for s, source in pairs if counts[s.gpu, s.operation, s.library] >= MIN_ROWS]


def _with_gpu(calibration: Calibration, gpu: str, data: Mapping[str, Any]) -> Calibration:
    """Returns the calibration with `data` as the file of `gpu`."""
    return calibration.with_file(load("gpus", gpu).name, dict(data))


def _fit_section(
    calibration: Calibration, gpu: str, data: Mapping[str, Any], section: str, pairs: Pairs, prior: bool = False
) -> dict[str, Any]:
    """Returns a section of the file whose other sections are `data`; prior: see `calibrate`."""
    samples, known, model = [sample for sample, _ in pairs], _with_gpu(calibration, gpu, data), KERNEL_MODELS[section]
    by = {sample: price_by(known, sample) for sample in samples}
    values = known_values(calibration, gpu, section, samples) if prior else {}
    fitted = _fit(model, samples, lambda sample, at: by[sample](at).seconds, values)
    prices = [(sample, by[sample](fitted.make_model(model, sample.library))) for sample in samples]
    formats = {sample.library: format_of_sample(sample) for sample in samples}
    unnamed = [format_of_sample(sample) for sample in samples if sample.tuned] or formats.values()
    entry = make_section(model, fitted, sigmas_by_library(prices), dict.fromkeys(unnamed, UNKNOWN), pairs, formats)
    for sample in samples:
        if not sample.tuned:
            entry["libraries"][sample.library]["tuned"] = False
    for form in entry["unnamed"]:
        similar = [sample for sample in samples if format_of_sample(sample) == form]
        similar = [sample for sample in similar if sample.tuned] or similar
        entry["unnamed"][form] = sigmas_of_all(
            _price_by_others(calibration, gpu, {**data, section: entry}, section, similar)
        )
    return entry


def _price_by_others(
    calibration: Calibration, gpu: str, data: Mapping[str, Any], section: str, samples: Sequence[KernelSample]
) -> list[tuple[KernelSample, RowForecasts]]:
    """Prices samples of a number format as kernels of an unnamed library: by the mean of the libraries of this format
    other than their own, or with their own where it is alone. data: of the file."""
    similar = {sample.library: data[section]["libraries"][sample.library] for sample in samples}
    prices = []
    for library in similar:
        others = {name: entry for name, entry in similar.items() if name != library} or similar
        known = _with_gpu(calibration, gpu, {**data, section: {**data[section], "libraries": others}})
        prices += [(sample, price(known, sample, library="")) for sample in of_library(samples, library)]
    return prices


def known_values(
    calibration: Calibration, gpu: str, section: str, samples: Sequence[KernelSample]
) -> dict[Name, float]:
    """Returns the coefficients of a section as `calibration` has them for the GPU and the libraries of the samples."""
    known = coefficients(KERNEL_MODELS[section])
    values: dict[Name, float] = {}
    for sample in samples:
        model = calibration.kernel_model(load("gpus", gpu), section, sample.library, format_of_sample(sample)).model
        for name, coefficient in known.items():
            library = sample.library if coefficient.of == "library" else None
            values.setdefault((name, library), float(getattr(model, name)))
    return values


def _fit(
    model: type,
    samples: Sequence[KernelSample],
    predict: Callable[[KernelSample, Any], np.ndarray],
    prior: Mapping[Name, float],
) -> Fit:
    """Returns the fit of a cost model to all libraries.

    Kernels that were not tuned to their sizes say nothing of the GPU: their library coefficients are fitted afterwards.
    """
    tuned = [sample for sample in samples if sample.tuned]
    return fit_further(fit(model, tuned or samples, predict, prior=prior), model, samples, predict, prior)


def format_of_sample(sample: KernelSample) -> str:
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
    """Counts the errors of the rows of a library with its coefficients and, where asked for, without having seen it."""
    samples = of_library((sample for sample, _ in pairs), library)
    known = _with_gpu(calibration, gpu, data)
    seen = [(sample, price(known, sample)) for sample in samples]
    others = [(sample, source) for sample, source in pairs if sample.library != library]
    if not (leave_out and others):
        return LibraryErrors.of(section, library, seen)
    rest = {key: entry for key, entry in data.items() if key != section}
    known = _with_gpu(calibration, gpu, {**rest, section: _fit_section(calibration, gpu, rest, section, others)})
    return LibraryErrors.of(section, library, seen, [(sample, price(known, sample, library="")) for sample in samples])
