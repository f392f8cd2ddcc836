"""Forecasts of samples of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hardware import load
from hardware.errors import CatalogError
from simulator.costs.calibration.calibration import Calibration
from simulator.costs.coefficients import spread
from simulator.costs.collectives import dispatch
from simulator.costs.collectives.dispatch import Dispatch
from simulator.costs.kernels import sections
from validation.calibration.kernels.dispatch import links
from validation.calibration.kernels.sample import Sample
from validation.calibration.tables.rows import Held, Priced


def priced(calibration: Calibration, sample: Sample, without: str = "", library: str | None = None) -> Priced:
    """The forecasts of a sample.

    without: a calibration that is passed over. library: whose kernels they are taken for, instead of their own ("":
    nobody's in particular).
    """
    law = _law(calibration, sample, sample.operation, without, library)
    return pricing(calibration, sample, without, library)(law)


def pricing(
    calibration: Calibration, sample: Sample, without: str = "", library: str | None = None
) -> Callable[[Any], Priced]:
    """The forecasts of a sample by the law of its operation, which is still open."""
    gpu, nothing = load("gpus", sample.gpu), np.zeros(len(sample.index))
    parts = [(part, _section_of(part, gpu)) for part in sample.parts]
    own = [part for part, section in parts if section == sample.operation]
    rest = [
        _seconds(part, gpu, _law(calibration, sample, section, without, library))
        for part, section in parts
        if section != sample.operation
    ]
    before = [sum((pair[i] for pair in rest), nothing) for i in (0, 1)]

    def by(law: Any) -> Priced:
        times = [_seconds(part, gpu, law) for part in own]
        seconds, launch = (sum((pair[i] for pair in times), before[i]) for i in (0, 1))
        return Priced(seconds, launch, spread(law, seconds, launch))

    return by


def _section_of(part: Any, gpu: Any) -> str:
    return part.operation if isinstance(part, Dispatch) else sections.section_of(part, gpu)


def _seconds(part: Any, gpu: Any, law: Any) -> tuple[Any, Any]:
    if isinstance(part, Dispatch):
        return dispatch.seconds(part, gpu, *links(gpu.name), law)
    return sections.SECTIONS[sections.section_of(part, gpu)].seconds(part, gpu, law)


def _law(calibration: Calibration, sample: Sample, section: str, without: str, library: str | None) -> Any:
    dtypes = [part.dtype for part in sample.parts if hasattr(part, "dtype")] or ["bf16"]
    used = sample.library if library is None else library
    gpu = load("gpus", sample.gpu)
    return calibration.kernel_model(gpu, section, used, dtypes[0], sample.kind, without).model


def hold(calibration: Calibration, sample: Sample) -> Held:
    """A sample beside its forecasts."""
    gpu = load("gpus", sample.gpu)
    # What a benchmark's loop left in the cache is read at the cache's speed: only FLOPs bound such a kernel surely.
    bound = sum((_least(part, gpu) for part in sample.parts), 0.0)
    nothing = np.zeros(len(sample.index))
    try:
        borrowed = priced(calibration, sample, without=sample.gpu).seconds
    except CatalogError:  # no other GPU has such a section
        borrowed = nothing + np.nan
    return Held(sample, priced(calibration, sample), borrowed, bound + nothing)


def _least(part: Any, gpu: Any) -> Any:
    if isinstance(part, Dispatch):
        return dispatch.least(part, *links(gpu.name))
    return part.flops / gpu.peak[part.dtype] if hasattr(part, "dtype") else 0.0
