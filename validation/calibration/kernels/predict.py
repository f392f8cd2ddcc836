"""Forecasts of samples of kernels by a calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshcast.hardware import load
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.coefficients import estimate_sigma
from meshcast.simulator.costs.collectives import dispatch
from meshcast.simulator.costs.collectives.dispatch import Dispatch
from meshcast.simulator.costs.kernels import sections
from meshcast.validation.calibration.kernels.dispatch import links_of
from meshcast.validation.calibration.kernels.sample import KernelSample
from meshcast.validation.calibration.tables.rows import RowForecasts, SampleComparison, compare


def price(
    calibration: Calibration, sample: KernelSample, without: str = "", library: str | None = None
) -> RowForecasts:
    """Returns the forecasts of a sample.

    without: a calibration file that is left out. library: that the kernels are priced as, instead of their own ("": the
    mean of all).
    """
    model = _model(calibration, sample, sample.operation, without, library)
    return price_by(calibration, sample, without, library)(model)


def price_by(
    calibration: Calibration, sample: KernelSample, without: str = "", library: str | None = None
) -> Callable[[Any], RowForecasts]:
    """Returns a function from the cost model of the sample's operation to its forecasts."""
    gpu, nothing = load("gpus", sample.gpu), np.zeros(len(sample.index))
    works: Sequence[Any] = sample.parts
    parts = [(part, part.operation if isinstance(part, Dispatch) else sections.section_of(part, gpu)) for part in works]
    priced_by_model = [part for part, section in parts if section == sample.operation]
    rest = [
        _seconds(part, gpu, _model(calibration, sample, section, without, library))
        for part, section in parts
        if section != sample.operation
    ]
    before = [sum((pair[i] for pair in rest), nothing) for i in (0, 1)]

    def by(model: Any) -> RowForecasts:
        times = [_seconds(part, gpu, model) for part in priced_by_model]
        seconds, launch = (sum((pair[i] for pair in times), before[i]) for i in (0, 1))
        return RowForecasts(seconds, launch, estimate_sigma(model, seconds, launch))

    return by


def _seconds(part: Any, gpu: Any, model: Any) -> tuple[Any, Any]:
    if isinstance(part, Dispatch):
        return dispatch.seconds(part, gpu, *links_of(gpu.name), model)
    return sections.SECTIONS[sections.section_of(part, gpu)].seconds(part, gpu, model)


def _model(calibration: Calibration, sample: KernelSample, section: str, without: str, library: str | None) -> Any:
    dtypes = [part.dtype for part in sample.parts if hasattr(part, "dtype")] or ["bf16"]
    used = sample.library if library is None else library
    return calibration.kernel_model(load("gpus", sample.gpu), section, used, dtypes[0], sample.kind, without).model


def compare_sample(calibration: Calibration, sample: KernelSample) -> SampleComparison:
    """Returns a sample beside its forecasts."""
    gpu = load("gpus", sample.gpu)
    # What a benchmark's loop left in the cache is read at the cache's speed: only FLOPs are a certain bound.
    bound = sum((_lower_bound(part, gpu) for part in sample.parts), 0.0)
    return compare(sample, price(calibration, sample), lambda: price(calibration, sample, without=sample.gpu), bound)


def _lower_bound(part: Any, gpu: Any) -> Any:
    if isinstance(part, Dispatch):
        return dispatch.lower_bound(part, *links_of(gpu.name))
    return part.flops / gpu.peak[part.dtype] if hasattr(part, "dtype") else 0.0
