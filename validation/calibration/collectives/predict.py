"""Forecasts of samples of collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from hardware.errors import CatalogError
from simulator.costs.calibration.calibration import Calibration
from simulator.costs.calibration.cost_models import family
from simulator.costs.coefficients import spread
from simulator.costs.collectives.links import Laws, LinkLaw
from validation.calibration.collectives.sample import Sample, least, predict
from validation.calibration.kernels import predict as kernels
from validation.calibration.tables.rows import Held, Priced


def laws_of(calibration: Calibration, sample: Sample, without: bool = False, library: str | None = None) -> Laws:
    """The laws of a sample's tiers. without: those of other links and networks. library: who called
    them, instead of its own ("": nobody in particular)."""
    network = sample.cluster.scale_out
    outer = calibration.network_model(network, sample.kind, family(network.kind) if without else "").model
    return Laws(*laws_inside(calibration, sample, without, library), outer)


def laws_inside(
    calibration: Calibration, sample: Sample, without: bool = False, library: str | None = None
) -> tuple[LinkLaw, LinkLaw]:
    """The same of the tiers of an island: scale-up links and links to the host."""
    used, cluster = sample.library if library is None else library, sample.cluster
    inner, host = (
        calibration.link_models(tier, used, sample.kind, family(tier.kind) if without else "").model
        for tier in (cluster.scale_up if cluster.node.scale_up else cluster.host, cluster.host)
    )
    return inner, host


def priced(sample: Sample, laws: Laws) -> Priced:
    """The forecasts of a sample by these laws."""
    seconds, launch = predict(sample, laws)
    return Priced(seconds, launch, spread(law_in(sample, laws), seconds, launch) + 0 * seconds)


def law_in(sample: Sample, laws: Laws) -> Any:
    """The law that a sample tells of."""
    if sample.operation == "network":
        return laws.outer
    hosted = sample.link == sample.cluster.host.kind
    return getattr(laws.host if hosted else laws.inner, sample.operation)


def hold(calibration: Calibration, sample: Any) -> Held:
    """A sample of collectives, or of calls that dispatch tokens, beside its forecasts."""
    if not isinstance(sample, Sample):
        return kernels.hold(calibration, sample)
    laws = laws_of(calibration, sample)
    bound = least(sample, laws) + np.zeros(len(sample.index))
    try:
        borrowed = priced(sample, laws_of(calibration, sample, without=True)).seconds
    except CatalogError:  # no other links have such a section
        borrowed = np.full(len(sample.index), np.nan)
    return Held(sample, priced(sample, laws), borrowed, bound)
