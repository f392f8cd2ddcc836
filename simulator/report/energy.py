"""Energy of a step: that of the kernels, communication and waiting of every GPU, of their nodes and the data centre."""

from __future__ import annotations

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.power import Overhead, PowerModel, overhead, power_model
from meshcast.simulator.program.block import SUMS
from meshcast.simulator.program.categories import COMPUTING
from meshcast.simulator.report.forecast import Forecast

KWH = 3.6e6
"""Joules of a kilowatt-hour."""


@dataclass(frozen=True)
class StepEnergy:
    """Energy of a step.

    gpus: number of GPUs.
    seconds: duration of the step.
    gpu_watts: power of a GPU, the mean over all GPUs and the step [W].
    beside: power of a node beside its GPUs, for each GPU, the mean over all [W].
    pue: power usage effectiveness of the data centre.
    sigma: standard deviation of log(measured / forecast) of `gpu_watts`.
    assumed: what was assumed of power, a sentence each.
    """

    gpus: int
    seconds: float
    gpu_watts: float
    beside: float
    pue: float
    sigma: float
    assumed: tuple[str, ...]

    @property
    def watts(self) -> float:
        """Power of all GPUs with their nodes and their share of the data centre [W]."""
        return self.gpus * (self.gpu_watts + self.beside) * self.pue

    @property
    def kwh(self) -> float:
        """Energy of the step, nodes and data centre included [kWh]."""
        return self.watts * self.seconds / KWH


def step_energy(forecast: Forecast, seconds: float) -> StepEnergy:
    """Returns the energy of a step as it was played. seconds: its duration with the framework's constant time."""
    plan = forecast.plan
    run, clusters = plan.job.run, plan.ranks.clusters
    gpus = {id(cluster): cluster.gpu for cluster in clusters}
    of_clusters = {key: (power_model(gpu), overhead(gpu, run.node_watts_per_gpu, run.pue)) for key, gpu in gpus.items()}
    models = [of_clusters[id(cluster)][0] for cluster in clusters]
    added = np.sum([_added_joules(part, models) for part in forecast.parts], axis=0)
    watts = np.array([model.idle_watts for model in models]) + added / seconds
    watts = np.minimum(watts, [model.limit for model in models])
    every = [of_clusters[id(cluster)][1] for cluster in clusters]
    weights = plan.ranks.device_weights / plan.ranks.devices
    return StepEnergy(
        gpus=int(plan.job.cluster.gpus),
        seconds=seconds,
        gpu_watts=float(watts @ weights),
        beside=float(np.array([added.node for added in every]) @ weights),
        pue=every[0].pue,
        sigma=max(model.sigma for model in models),
        assumed=_name_assumed(models, every),
    )


def _name_assumed(models: list[PowerModel], every: list[Overhead]) -> tuple[str, ...]:
    sources = [*(model.assumed for model in models), *(added.assumed for added in every)]
    return tuple(dict.fromkeys(text for assumed in sources for text in assumed))


def _added_joules(forecast: Forecast, models: list[PowerModel]) -> np.ndarray:
    """Returns the energy of a GPU of every pipeline device in what was played beyond its idle power [J].

    Ops count for as long as they take alone. What is left of the step is waiting for other stages, if there are some:
    where communication overlaps computation it is longer by that overlap, which this leaves out.
    """
    kernels, others = forecast.joules(models).T
    computing = forecast.sums[:, : len(COMPUTING), SUMS.index("seconds")].sum(axis=1)
    most = [model.most_joules(float(seconds)) for model, seconds in zip(models, computing, strict=True)]
    added = np.minimum(kernels, most) + others
    if len(added) > 1:
        busy = forecast.sums[..., SUMS.index("lasting")].sum(axis=1)
        waiting = np.maximum(forecast.played_seconds - busy, 0.0)
        added += waiting * [model.waiting * model.limit for model in models]
    return added
