"""Samples of measured collectives, and their forecasts by cost models and by a calibration."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.records import dataclass
from meshcast.hardware.topology import Reach
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.calibration.cost_models import family
from meshcast.simulator.costs.coefficients import estimate_sigma
from meshcast.simulator.costs.collectives import collective, p2p
from meshcast.simulator.costs.collectives.links import LinkCostModels, Links, TierCostModels, crosses_host
from meshcast.simulator.ir.ops import Collective, Transfer
from meshcast.validation.calibration.kernels import predict as kernels
from meshcast.validation.calibration.tables.rows import RowForecasts, Rows, SampleComparison, compare


@dataclass(frozen=True, eq=False, kw_only=True)
class CollectiveSample(Rows):
    """Rows of collectives of a group of GPUs, which differ in bytes only.

    Attributes:
        cluster: that they ran on.
        reach: where the group sits in the cluster.
        work: with an array of bytes.
        nvls: whether NVLS may be used (it adds no 8-bit integers, and it can be turned off).
    """

    cluster: Cluster
    reach: Reach
    work: Collective | Transfer
    nvls: bool

    @property
    def link(self) -> str:
        """Catalog name of the slowest links within the nodes."""
        return self.cluster.host.kind if crosses_host(self.reach) else self.cluster.scale_up.kind

    @property
    def network(self) -> str:
        """Catalog name of the network between nodes, "" within a node."""
        return self.cluster.scale_out.kind if self.reach.nodes.number > 1 else ""

    def shape(self, at: int) -> str:
        """Describes the sizes of a row."""
        return f"{self.reach.members} GPUs in {self.reach.nodes.number}, {self.work.nbytes[at]:,.0f} bytes"  # type: ignore[index]


def links_of(sample: CollectiveSample, models: TierCostModels) -> Links:
    """Returns the links of a sample's cluster as its library uses them."""
    return Links(sample.cluster, models, nvls=sample.nvls)


def predict(sample: CollectiveSample, models: TierCostModels) -> tuple[np.ndarray, np.ndarray]:
    """Returns the seconds of a sample's rows, and the part of them that moves no bytes."""
    links = links_of(sample, models)
    if isinstance(sample.work, Transfer):
        busy, latency = p2p.seconds(sample.work.nbytes, sample.reach, links)
        return busy + latency, latency + np.zeros(len(sample.index))
    return collective.seconds(sample.work, sample.reach, links)


def lower_bound(sample: CollectiveSample, models: TierCostModels) -> np.ndarray:
    """Returns the time [s] that no collective of these sizes can beat on these links."""
    links = links_of(sample, models)
    if isinstance(sample.work, Transfer):
        return p2p.lower_bound(sample.work.nbytes, sample.reach, links)
    return collective.lower_bound(sample.work, sample.reach, links)


def tier_models(
    calibration: Calibration, sample: CollectiveSample, without: bool = False, library: str | None = None
) -> TierCostModels:
    """Returns the cost models of a sample's tiers.

    without: those of other links and networks. library: program that called them, instead of the sample's ("": plain
    NCCL).
    """
    network = sample.cluster.scale_out
    outer = calibration.network_model(network, sample.kind, family(network.kind) if without else "").model
    return TierCostModels(*node_models(calibration, sample, without, library), outer)


def node_models(
    calibration: Calibration, sample: CollectiveSample, without: bool = False, library: str | None = None
) -> tuple[LinkCostModels, LinkCostModels]:
    """Returns the same of the tiers within a node: scale-up links and links to the host."""
    used, cluster = sample.library if library is None else library, sample.cluster
    scale_up, host = (
        calibration.link_models(tier, used, sample.kind, family(tier.kind) if without else "").model
        for tier in (cluster.scale_up if cluster.node.scale_up else cluster.host, cluster.host)
    )
    return scale_up, host


def price(sample: CollectiveSample, models: TierCostModels) -> RowForecasts:
    """Returns the forecasts of a sample by these cost models."""
    seconds, launch = predict(sample, models)
    place, sigma = (
        links_of(sample, models).place_sigma(sample.reach),
        estimate_sigma(model_of(sample, models), seconds, launch),
    )
    return RowForecasts(seconds, launch, np.hypot(sigma, place) + 0 * seconds)


def model_of(sample: CollectiveSample, models: TierCostModels) -> Any:
    """Returns the cost model that a sample is fitted to."""
    if sample.operation == "network":
        return models.network
    return getattr(models.host if sample.link == sample.cluster.host.kind else models.scale_up, sample.operation)


def compare_sample(calibration: Calibration, sample: Any) -> SampleComparison:
    """Returns a sample of collectives, or of calls that dispatch tokens, beside its forecasts."""
    if not isinstance(sample, CollectiveSample):
        return kernels.compare_sample(calibration, sample)
    models = tier_models(calibration, sample)
    return compare(
        sample,
        price(sample, models),
        lambda: price(sample, tier_models(calibration, sample, without=True)),
        lower_bound(sample, models),
    )
