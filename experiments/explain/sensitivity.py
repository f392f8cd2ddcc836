"""What every figure of the hardware is worth: the change of the step time with each, all others kept; and which
uncertainties widen the interval most.

A figure is made better and worse by `STEP`, and the job forecast again. Between two points at which the critical path
changes, the step time is linear in the time of every op, so the difference quotient over one percent is the derivative
itself; over `RANGE` it shows what the next generation would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hardware.cluster import Cluster
from hardware.errors import PlanError
from hardware.link import Link
from simulator.job.job import Job
from simulator.report.report import Report

STEP = 0.01
"""Change of a figure for its derivative."""
RANGE = 0.1
"""Change of a figure for its range, either way."""

Change = Callable[[Job, float], Job]
"""Makes a figure of a job's hardware better by a factor: a rate larger, a latency shorter."""


@dataclass(frozen=True)
class HardwareFigure:
    """One figure of the hardware.

    value: in SI units, as the catalog or the job states it.
    unit: of the value, for people.
    """

    name: str
    label: str
    value: float
    unit: str
    change: Change


@dataclass(frozen=True)
class Sensitivity:
    """What a figure is worth.

    saved_s: seconds that a step gets shorter if the figure gets better by one percent.
    better_s, worse_s: step time with the figure better and worse by `RANGE` [s].
    """

    figure: HardwareFigure
    saved_s: float
    better_s: float
    worse_s: float

    @property
    def swing_s(self) -> float:
        """Seconds between the ends of the range."""
        return self.worse_s - self.better_s


@dataclass(frozen=True)
class Sensitivities:
    """A forecast, what every figure of its hardware is worth, the most valuable first, and what widens its interval."""

    report: Report
    found: tuple[Sensitivity, ...]

    @property
    def variance(self) -> dict[str, float]:
        """Share of every contribution in the variance of log(measured / forecast), the largest first.

        Keys are those of `Metrics.sigmas`.
        """
        squares = {source: sigma**2 for source, sigma in self.report.sigmas.items()}
        total = sum(squares.values())
        return {source: squares[source] / total for source in sorted(squares, key=lambda one: -squares[one]) if total}

    def to_dict(self) -> dict[str, Any]:
        """The JSON answer."""
        answer = self.report.to_dict()
        return {
            **{key: answer[key] for key in ("step_time_s", "interval_90_s", "breakdown_s", "limits", "assumed")},
            "interval_variance": self.variance,
            "range": RANGE,
            "hardware": [
                {
                    "figure": one.figure.name,
                    "value": one.figure.value,
                    "saved_s_per_percent": one.saved_s,
                    "step_time_s": {"better": one.better_s, "worse": one.worse_s},
                }
                for one in self.found
            ],
        }


def explain(job: Job, watch: Callable[[Iterable[HardwareFigure]], Iterable[HardwareFigure]] = iter) -> Sensitivities:
    """Forecasts a job, and again with every figure of its hardware changed. watch: passes figures on, as a progress
    bar does."""
    from simulator import simulate

    report = simulate(job)
    found = []
    for figure in watch(hardware_figures(job)):
        times = {by: simulate(figure.change(job, 1 + by)).step_time for by in (STEP, RANGE, -RANGE)}
        saved = (report.step_time - times[STEP]) / (100 * STEP)
        found.append(Sensitivity(figure, saved, times[RANGE], times[-RANGE]))
    return Sensitivities(report, tuple(sorted(found, key=lambda one: -one.swing_s)))


def hardware_figures(job: Job) -> list[HardwareFigure]:
    """The figures of a job's hardware that can change its forecast. Raises PlanError for several kinds of nodes."""
    cluster = job.cluster
    if cluster.groups:
        rule = "its nodes are of several kinds, each with figures of its own"
        raise PlanError("cluster", rule, "Explain a job on one kind of nodes", cluster.name)
    return list(_figures(job, cluster))


def _figures(job: Job, cluster: Cluster) -> Iterator[HardwareFigure]:
    gpu, precision = cluster.gpu, job.precision.compute
    dtype = precision if precision in gpu.peak else "bf16" if "bf16" in gpu.peak else next(iter(gpu.peak))
    yield HardwareFigure("peak", "peak rates of the GPU", gpu.peak[dtype], "FLOP/s", _change_peaks)
    yield HardwareFigure(
        "memory_bandwidth", "memory bandwidth", gpu.memory_bandwidth, "B/s", _change_gpu("memory_bandwidth")
    )
    if cluster.scale_up.bandwidth and cluster.scale_up_domain > 1:
        yield from _link_figures("scale_up", cluster.scale_up.kind, cluster.node.scale_up.link, _change_scale_up)  # type: ignore[union-attr]
    if cluster.node.nics and cluster.gpus > cluster.local_gpus:
        yield from _link_figures("network", cluster.scale_out.kind, cluster.node.nics.link, _change_network)
    yield from _link_figures("host_link", cluster.host.kind, gpu.host, _change_host)
    if job.framework.launch_s and job.framework.cuda_graphs is not True:
        yield HardwareFigure("launch", "launch time of the host", job.framework.launch_s, "s", _change_launch)


def _link_figures(name: str, kind: str, link: Link, put: Callable[[Job, Link], Job]) -> Iterator[HardwareFigure]:
    """Bandwidth and latency of one kind of links. put: makes the job with other links of this kind."""

    def rate(job: Job, by: float) -> Job:
        return put(job, link.model_copy(update={"rate": type(link.rate)(link.rate * by)}))

    def latency(job: Job, by: float) -> Job:
        return put(job, link.model_copy(update={"latency": type(link.latency)(link.latency / by)}))

    yield HardwareFigure(f"{name}_bandwidth", f"bandwidth of {kind}", link.bandwidth, "B/s", rate)
    if link.latency:
        yield HardwareFigure(f"{name}_latency", f"latency of {kind}", link.latency, "s", latency)


def _with_node(job: Job, **changes: Any) -> Job:
    cluster = job.cluster
    return job.model_copy(
        update={"cluster": cluster.model_copy(update={"node": cluster.node.model_copy(update=changes)})}
    )


def _with_gpu(job: Job, **changes: Any) -> Job:
    return _with_node(job, gpu=job.cluster.gpu.model_copy(update=changes))


def _change_peaks(job: Job, by: float) -> Job:
    return _with_gpu(job, peak={dtype: type(peak)(peak * by) for dtype, peak in job.cluster.gpu.peak.items()})


def _change_gpu(field: str) -> Change:
    def change(job: Job, by: float) -> Job:
        value = getattr(job.cluster.gpu, field)
        return _with_gpu(job, **{field: type(value)(value * by)})

    return change


def _change_scale_up(job: Job, link: Link) -> Job:
    up = job.cluster.node.scale_up
    assert up is not None
    return _with_node(job, scale_up=up.model_copy(update={"link": link}))


def _change_network(job: Job, link: Link) -> Job:
    nics = job.cluster.node.nics
    assert nics is not None
    return _with_node(job, nics=nics.model_copy(update={"link": link}))


def _change_host(job: Job, link: Link) -> Job:
    return _with_gpu(job, host=link)


def _change_launch(job: Job, by: float) -> Job:
    framework = job.framework
    return job.model_copy(update={"framework": framework.model_copy(update={"launch_s": framework.launch_s / by})})
