"""Forecasts of samples of collectives."""

from __future__ import annotations

from typing import Any

import numpy as np

from hardware.errors import CatalogError
from simulator.costs.calibration.calibration import family, link_law, network_law
from simulator.costs.coefficients import spread
from simulator.costs.collectives.links import Laws, LinkLaw
from validation.calibration.collectives.sample import Sample, least, predict
from validation.calibration.kernels import predict as kernels
from validation.calibration.tables.rows import Held, Priced


def laws_of(sample: Sample, without: bool = False, library: str | None = None) -> Laws:
    """The laws of a sample's tiers. without: those of other links and networks. library: see `priced`."""
    network = sample.cluster.scale_out
    outer = network_law(network, sample.kind, family(network.kind) if without else "")[0]
    return Laws(*laws_inside(sample, without, library), outer)


def laws_inside(sample: Sample, without: bool = False, library: str | None = None) -> tuple[LinkLaw, LinkLaw]:
    """The same of the tiers of an island: scale-up links and links to the host."""
    used, cluster = sample.library if library is None else library, sample.cluster
    inner, host = (
        link_law(tier, used, sample.kind, family(tier.kind) if without else "")[0]
        for tier in (cluster.scale_up if cluster.node.scale_up else cluster.host, cluster.host)
    )
    return inner, host


def priced(sample: Sample, laws: Laws | None = None, without: bool = False, library: str | None = None) -> Priced:
    """The forecasts of a sample.

    laws: used in place of calibrated ones. library: who called them, instead of its own ("": nobody in particular).
    """
    laws = laws or laws_of(sample, without, library)
    seconds, launch = predict(sample, laws)
    return Priced(seconds, launch, spread(law_in(sample, laws), seconds, launch) + 0 * seconds)


def law_in(sample: Sample, laws: Laws) -> Any:
    """The law that a sample tells of."""
    if sample.operation == "network":
        return laws.outer
    hosted = sample.link == sample.cluster.host.kind
    return getattr(laws.host if hosted else laws.inner, sample.operation)


def hold(sample: Any) -> Held:
    """A sample of collectives, or of calls that dispatch tokens, beside its forecasts."""
    if not isinstance(sample, Sample):
        return kernels.hold(sample)
    laws = laws_of(sample)
    bound = least(sample, laws) + np.zeros(len(sample.index))
    try:
        borrowed = priced(sample, without=True).seconds
    except CatalogError:  # no other links have such a section
        borrowed = np.full(len(sample.index), np.nan)
    return Held(sample, priced(sample, laws), borrowed, bound)
