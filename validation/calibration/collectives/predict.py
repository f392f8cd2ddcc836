"""Forecasts of samples of collectives by a calibration."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.hardware.errors import CatalogError
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.calibration.cost_models import family
from meshcast.simulator.costs.coefficients import estimate_sigma
from meshcast.simulator.costs.collectives.links import LinkCostModels, TierCostModels
from meshcast.validation.calibration.collectives.sample import CollectiveSample, lower_bound, predict
from meshcast.validation.calibration.kernels import predict as kernels
from meshcast.validation.calibration.tables.rows import RowForecasts, SampleComparison


def tier_models(
    calibration: Calibration, sample: CollectiveSample, without: bool = False, library: str | None = None
) -> TierCostModels:
    """The cost models of a sample's tiers.

    without: those of other links and networks. library: program that called them, instead of the sample's ("": plain
    NCCL).
    """
    network = sample.cluster.scale_out
    outer = calibration.network_model(network, sample.kind, family(network.kind) if without else "").model
    return TierCostModels(*node_models(calibration, sample, without, library), outer)


def node_models(
    calibration: Calibration, sample: CollectiveSample, without: bool = False, library: str | None = None
) -> tuple[LinkCostModels, LinkCostModels]:
    """The same of the tiers within a node: scale-up links and links to the host."""
    used, cluster = sample.library if library is None else library, sample.cluster
    scale_up, host = (
        calibration.link_models(tier, used, sample.kind, family(tier.kind) if without else "").model
        for tier in (cluster.scale_up if cluster.node.scale_up else cluster.host, cluster.host)
    )
    return scale_up, host


def price(sample: CollectiveSample, models: TierCostModels) -> RowForecasts:
    """The forecasts of a sample by these cost models."""
    seconds, launch = predict(sample, models)
    return RowForecasts(seconds, launch, estimate_sigma(model_of(sample, models), seconds, launch) + 0 * seconds)


def model_of(sample: CollectiveSample, models: TierCostModels) -> Any:
    """The cost model that a sample is fitted to."""
    if sample.operation == "network":
        return models.network
    at_host = sample.link == sample.cluster.host.kind
    return getattr(models.host if at_host else models.scale_up, sample.operation)


def compare_sample(calibration: Calibration, sample: Any) -> SampleComparison:
    """A sample of collectives, or of calls that dispatch tokens, beside its forecasts."""
    if not isinstance(sample, CollectiveSample):
        return kernels.compare_sample(calibration, sample)
    models = tier_models(calibration, sample)
    bound = lower_bound(sample, models) + np.zeros(len(sample.index))
    try:
        borrowed = price(sample, tier_models(calibration, sample, without=True)).seconds
    except CatalogError:  # no other links have such a section
        borrowed = np.full(len(sample.index), np.nan)
    return SampleComparison(sample, price(sample, models), borrowed, bound)
