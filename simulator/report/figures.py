"""The table of figures: every number of a forecast that is shown to users, with its definition, unit and formats.

`FIGURES` determines the JSON answer, the first rows of the page of ``predict``, its table of times, the columns of a
sweep, the values of a heatmap, the tables of ``sweep`` and ``scale``, and docs/figures.md. A figure is added here and
nowhere else: docs/add-a-figure.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.report.energy import KWH
from meshcast.simulator.report.formatting import format_count, format_days, format_number, format_seconds
from meshcast.simulator.report.host_memory import sum_offloaded
from meshcast.simulator.report.metrics import CAUSE, REGIME, Z90, Metrics

Better = Literal["lower", "higher", "neither"]

Place = Literal["best", "curve", "points"]
"""Tables with some of the figures: best plans of ``sweep``, points of ``scale`` on its page and in its JSON answer."""

PARTS = "breakdown_s."
"""Prefix of the paths of the figures that add up to the step time."""


@dataclass(frozen=True)
class Headline:
    """A row at the top of the page of ``predict``."""

    name: str
    """First word of the row."""
    form: Callable[[float], str] = format_number
    """Writes the value, with its unit if `name` does not imply it."""
    remark: Callable[[Metrics], str] | None = None
    """Writes the text after the value; the figure's sentence if None."""


@dataclass(frozen=True)
class Figure:
    """One number of a forecast."""

    name: str
    """Unique name: column of a sweep, ``--value`` of a heatmap."""
    compute: Callable[[Metrics], float | None]
    """Value of a forecast; None if the job does not say enough."""
    unit: str
    """Unit of the value; "fraction" of a ratio, empty if the sentence says it."""
    better: Better
    """Which of two values is better; with "neither" the figure ranks no plans, and no heatmap shows it."""
    label: str
    """Name on plots and in tables of parts."""
    sentence: str
    """Definition, with the formula where there is any."""
    path: str = ""
    """Place in the JSON answer, keys and list indices separated by dots; `name` if empty."""
    form: str = "{:,.4g}"
    """Format of the value in tables."""
    short: str = ""
    """Format in a cell of a heatmap; `form` if empty."""
    head: str = ""
    """Heading in tables, with the unit."""
    places: tuple[Place, ...] = ()
    """Tables that show the figure."""
    headline: Headline | None = None
    """Row on the page of ``predict``, left out where the value is 0; None if the page has none."""
    column: bool = True
    """Whether sweeps have a column of it."""
    kind: type = float
    """Type of that column: float, int, bool or str."""
    needs: str = ""
    """Key of the job without which the value is None, and without which a sweep has no such column."""

    @property
    def where(self) -> str:
        """Place in the JSON answer."""
        return self.path or self.name

    @property
    def best(self) -> Callable[..., Any]:
        """Function that picks the better of several values."""
        return min if self.better == "lower" else max

    @property
    def title(self) -> str:
        """Label with the unit as the formats write it, unless the label has it."""
        unit = "%" if self.form.endswith("%}") else self.unit
        return f"{self.label} [{unit}]" if unit and unit not in self.label.split() else self.label

    @property
    def part(self) -> str:
        """Label in tables that name the group of the part beside it."""
        return self.label.removeprefix("exposed ")

    def read(self, answer: Mapping[str, Any]) -> Any:
        """Reads the value from a JSON answer."""
        value: Any = answer
        for key in self.where.split("."):
            value = value[int(key) if key.isdigit() else key]
        return value

    def cell(self, value: float | None) -> str:
        """Formats the value for a table, whose heading has the unit; empty if there is no value."""
        return "" if value is None else self.form.format(value).removesuffix("%")

    def remark(self, metrics: Metrics) -> str:
        """Returns the text after the value on the page of ``predict``."""
        custom = self.headline.remark if self.headline else None
        return custom(metrics) if custom else self.sentence


# ------------------------------------------------------------------------------------------- remarks


def _interval(metrics: Metrics) -> str:
    low, high = metrics.interval_90
    return f"90% interval {format_seconds(low)} to {format_seconds(high)}"


def name_contribution(name: str) -> str:
    """Returns the label of a contribution to `Metrics.sigma`."""
    labels = {REGIME: "steps of this regime"} | {key: figure.label for key, figure in parts_of_step().items()}
    return labels.get(name, name.removeprefix(CAUSE))


def _whole_cluster(metrics: Metrics) -> str:
    return f"per GPU; {format_number(metrics.tokens_per_s_per_gpu * metrics.job.cluster.gpus)} of the whole cluster"


def _causal(metrics: Metrics) -> str:
    full, causal, most = metrics.mfu["palm"], metrics.mfu["causal"], metrics.peak_flops / 1e12
    rates = f"{full * most:,.0f} of {most:,.0f} TFLOP/s ({metrics.linear_format}) a GPU"
    return f"{rates}, full attention as in PaLM; {causal:.1%} causal"


def _run(metrics: Metrics) -> str:
    cost = "" if metrics.cost is None else f", cost {metrics.cost:,.0f}"
    carbon = "" if metrics.co2_t is None else f", {format_number(metrics.co2_t)} t CO2"
    energy = f", {format_number(metrics.energy_mwh or 0.0)} MWh"
    tokens = format_count(metrics.job.run.tokens or 0)
    return f"for {tokens} tokens: {metrics.gpu_hours:,.0f} GPU-hours{cost}{energy}{carbon}"


def _power(metrics: Metrics) -> str:
    energy, limits = metrics.energy, {float(cluster.gpu.power) for cluster in metrics.play.plan.ranks.clusters}
    limit = f" of {max(limits):,.4g} W" if len(limits) == 1 else ""
    assumed = " (partly assumed)" if energy.assumed else ""
    return (
        f"per GPU{limit}; {format_number(energy.watts / 1e3)} kW of the whole cluster with nodes "
        f"({energy.beside:,.0f} W a GPU) and a PUE of {energy.pue:g}{assumed}"
    )


def _host_use(metrics: Metrics, place: str) -> str:
    uses = [str(use) for use in metrics.host_uses if use.place == place]
    return f"offloaded: {'; '.join(uses)}"


# ----------------------------------------------------------------------------------------- the table


def _part(name: str, path: str, label: str, sentence: str, better: Better = "lower") -> Figure:
    """Returns the figure of a part of the breakdown of the slowest stage. path: its place below `PARTS`."""
    key = path.rpartition(".")[2]
    return Figure(
        name=name,
        compute=lambda metrics: metrics.parts[key],
        unit="s",
        better=better,
        label=label,
        sentence=sentence,
        path=PARTS + path,
    )


_TABLE = (
    Figure(
        name="step_time_s",
        compute=lambda metrics: metrics.step_time,
        unit="s",
        better="lower",
        label="step time",
        sentence="duration of one step, optimizer (none in a forward-only job) and the framework's constant time "
        "included",
        form="{:,.3f}",
        short="{:,.3g}",
        head="step s",
        places=("best", "curve", "points"),
        headline=Headline("step", format_seconds, _interval),
    ),
    Figure(
        name="interval_low_s",
        compute=lambda metrics: metrics.interval_90[0],
        unit="s",
        better="neither",
        label="90% interval, lower end",
        sentence="lower end of the interval that should hold nine of ten measured steps: `step_time_s` x "
        f"exp(-{Z90} x sigma), where sigma is the standard deviation of log(measured / forecast) below the forecast",
        path="interval_90_s.0",
        form="{:,.2f}",
        head="low",
        places=("best", "curve", "points"),
    ),
    Figure(
        name="interval_high_s",
        compute=lambda metrics: metrics.interval_90[1],
        unit="s",
        better="neither",
        label="90% interval, upper end",
        sentence=f"upper end of the interval: `step_time_s` x exp({Z90} x sigma), with the sigma above the forecast",
        path="interval_90_s.1",
        form="{:,.2f}",
        head="high",
        places=("best", "curve", "points"),
    ),
    Figure(
        name="tokens_per_s_per_gpu",
        compute=lambda metrics: metrics.tokens_per_s_per_gpu,
        unit="tokens/s",
        better="higher",
        label="tokens/s of a GPU",
        sentence="throughput: `batch.global` x `batch.sequence` / `step_time_s` / GPUs",
        form="{:,.1f}",
        short="{:,.0f}",
        head="tokens/s/GPU",
        places=("best", "curve", "points"),
        headline=Headline("tokens/s", format_number, _whole_cluster),
    ),
    Figure(
        name="mfu_palm",
        compute=lambda metrics: metrics.mfu["palm"],
        unit="fraction",
        better="higher",
        label="MFU, full attention",
        sentence="model FLOPs utilization: FLOPs of the model, without recomputation, over `step_time_s` x dense peak "
        "FLOP/s of all GPUs; attention is counted in full, as in PaLM, appendix B. A forward-only job has a third of "
        "the FLOPs of training",
        path="mfu.palm",
        form="{:.1%}",
        head="MFU %",
        places=("best", "points"),
        headline=Headline("MFU", "{:.1%}".format, _causal),
    ),
    Figure(
        name="mfu_causal",
        compute=lambda metrics: metrics.mfu["causal"],
        unit="fraction",
        better="higher",
        label="MFU, causal attention",
        sentence="model FLOPs utilization with half of attention, which is what a causal mask leaves",
        path="mfu.causal",
        form="{:.1%}",
        places=("points",),
    ),
    Figure(
        name="hfu",
        compute=lambda metrics: metrics.hfu,
        unit="fraction",
        better="higher",
        label="HFU",
        sentence="hardware FLOPs utilization: executed FLOPs, recomputation included, over the same peak",
        form="{:.1%}",
        headline=Headline("HFU", "{:.1%}".format, lambda _: "executed FLOPs: with recomputation, attention as masked"),
    ),
    Figure(
        name="peak_allocated_gib",
        compute=lambda metrics: metrics.peak_allocated / GIB,
        unit="GiB",
        better="lower",
        label="allocated memory of a GPU",
        sentence="peak memory of tensors on the fullest stage (`torch.cuda.max_memory_allocated`)",
        path="memory.peak_allocated_gib",
        form="{:,.1f}",
    ),
    Figure(
        name="peak_reserved_gib",
        compute=lambda metrics: metrics.peak_reserved / GIB,
        unit="GiB",
        better="lower",
        label="reserved memory of a GPU",
        sentence="`peak_allocated_gib` with fragmentation of the caching allocator (`torch.cuda.max_memory_reserved`)",
        path="memory.peak_reserved_gib",
        form="{:,.1f}",
        column=False,
    ),
    Figure(
        name="peak_device_gib",
        compute=lambda metrics: metrics.peak_device / GIB,
        unit="GiB",
        better="lower",
        label="peak memory of a GPU",
        sentence="`peak_reserved_gib` with the CUDA context and buffers of libraries, as nvidia-smi shows it",
        path="memory.peak_device_gib",
        form="{:,.1f}",
        head="GiB",
        places=("best", "points"),
    ),
    Figure(
        name="capacity_gib",
        compute=lambda metrics: metrics.capacity / GIB,
        unit="GiB",
        better="neither",
        label="memory capacity of a GPU",
        sentence="memory of a GPU; of the smallest, where stages have several kinds",
        path="memory.capacity_gib",
        form="{:,.1f}",
    ),
    Figure(
        name="fits_probability",
        compute=lambda metrics: metrics.fit.probability,
        unit="fraction",
        better="higher",
        label="probability that the plan fits",
        sentence="share of published peaks of its program that would fit, by how far they lie from their forecast",
        path="memory.fits_probability",
        form="{:.0%}",
    ),
    Figure(
        name="host_memory_gib",
        compute=lambda metrics: sum_offloaded(metrics.host_uses, "cpu") / GIB,
        unit="GiB",
        better="lower",
        label="host memory of a node",
        sentence="peak of offloaded states and activations in the host memory of the fullest node, summed over its "
        "ranks; without the operating system, data loaders and pinned buffers",
        path="memory.host_gib",
        form="{:,.1f}",
        headline=Headline("host", lambda gib: f"{gib:,.1f} GiB", lambda metrics: _host_use(metrics, "cpu")),
    ),
    Figure(
        name="disk_gib",
        compute=lambda metrics: sum_offloaded(metrics.host_uses, "nvme") / GIB,
        unit="GiB",
        better="lower",
        label="disk space of a node",
        sentence="peak of offloaded states and activations on the disks of the fullest node, summed over its ranks",
        path="memory.disk_gib",
        form="{:,.1f}",
        headline=Headline("disks", lambda gib: f"{gib:,.1f} GiB", lambda metrics: _host_use(metrics, "nvme")),
    ),
    _part("gemm_s", "compute.gemm", "GEMMs", "GEMM kernels, recomputed ones included", "neither"),
    _part("attention_s", "compute.attention", "attention", "attention kernels, recomputed ones included", "neither"),
    _part(
        "memory_bound_s",
        "compute.memory_bound",
        "memory-bound kernels",
        "kernels limited by memory bandwidth: norms, activations, additions, embedding, loss",
    ),
    *(
        _part(
            f"exposed_{axis}_s",
            f"exposed.{axis}",
            f"exposed {label}",
            f"{what}: time in which neither computation nor an axis above runs",
        )
        for axis, (label, what) in {
            "tp": ("tensor communication (tp)", "collectives of tensor parallelism"),
            "cp": ("context communication (cp)", "exchanges of context and sequence parallelism"),
            "ep": ("expert communication (ep)", "token dispatch and combine of expert parallelism"),
            "dp": ("data communication (dp)", "gradient reductions and weight all-gathers of data parallelism"),
            "pp": ("pipeline communication (pp)", "sends and receives between pipeline stages"),
            "copy": ("copies, host updates", "copies between GPU and host, and updates there (offloading)"),
        }.items()
    ),
    _part("bubble_s", "bubble", "pipeline bubble", "waiting for other pipeline stages"),
    _part("optimizer_s", "optimizer", "optimizer", "optimizer step; none in a forward-only job"),
    _part(
        "host_s",
        "host",
        "host: data, logging, launch",
        "waiting for the host to launch kernels, and the framework's constant time a step",
    ),
    _part("idle_s", "idle", "idle", "time of a step without a pipeline in which nothing runs"),
    Figure(
        name="gpu_power_w",
        compute=lambda metrics: metrics.energy.gpu_watts,
        unit="W",
        better="lower",
        label="power of a GPU",
        sentence="power of a GPU, the mean over the step and all GPUs, without its node",
        path="energy.gpu_power_w",
        form="{:,.0f}",
        headline=Headline("power", "{:,.0f} W".format, _power),
    ),
    Figure(
        name="step_energy_kwh",
        compute=lambda metrics: metrics.energy.kwh,
        unit="kWh",
        better="lower",
        label="energy of a step",
        sentence="energy of a step of all GPUs with their nodes: (`gpu_power_w` + `run.node_watts_per_gpu`) x GPUs x "
        "`run.pue` x `step_time_s`",
        path="energy.step_kwh",
        form="{:,.4g}",
    ),
    Figure(
        name="joules_per_token",
        compute=lambda metrics: metrics.energy.kwh * KWH / metrics.tokens,
        unit="J",
        better="lower",
        label="energy of a token",
        sentence="`step_energy_kwh` over the tokens of a step",
        path="energy.joules_per_token",
        form="{:,.3g}",
    ),
    Figure(
        name="days",
        compute=lambda metrics: metrics.days,
        unit="days",
        better="lower",
        label="training days",
        sentence="`run.tokens` / tokens of a step x `step_time_s`, without interruptions",
        path="run.days",
        form="{:,.3g}",
        headline=Headline("run", format_days, _run),
        needs="run",
    ),
    Figure(
        name="gpu_hours",
        compute=lambda metrics: metrics.gpu_hours,
        unit="GPU-hours",
        better="lower",
        label="total GPU-hours",
        sentence="`days` x 24 x GPUs",
        path="run.gpu_hours",
        needs="run",
    ),
    Figure(
        name="cost",
        compute=lambda metrics: metrics.cost,
        unit="",
        better="lower",
        label="training cost",
        sentence="`gpu_hours` x `run.price_per_gpu_hour`",
        path="run.cost",
        form="{:,.3g}",
        needs="run",
    ),
    Figure(
        name="energy_mwh",
        compute=lambda metrics: metrics.energy_mwh,
        unit="MWh",
        better="lower",
        label="training energy",
        sentence="`step_energy_kwh` x steps of `run.tokens`",
        path="run.energy_mwh",
        form="{:,.4g}",
        needs="run",
    ),
    Figure(
        name="co2_t",
        compute=lambda metrics: metrics.co2_t,
        unit="t",
        better="lower",
        label="training CO2",
        sentence="`energy_mwh` x `run.carbon_kg_per_kwh`",
        path="run.co2_t",
        form="{:,.4g}",
        needs="run",
    ),
)

FIGURES: dict[str, Figure] = {figure.name: figure for figure in _TABLE}
"""All figures by name, in the order of columns and pages."""


# ------------------------------------------------------------------------------------------- reading


def shown_in(place: Place) -> list[Figure]:
    """Returns the figures of a table that shows only some."""
    return [figure for figure in FIGURES.values() if place in figure.places]


def parts_of_step() -> dict[str, Figure]:
    """Returns the figures that add up to the step time, by their keys in `Metrics.parts`."""
    parts = (figure for figure in FIGURES.values() if figure.where.startswith(PARTS))
    return {figure.where.rpartition(".")[2]: figure for figure in parts}


def columns(keys: Container[str]) -> list[Figure]:
    """Returns the figures that are columns of a sweep. keys: of its jobs."""
    return [figure for figure in FIGURES.values() if figure.column and (not figure.needs or figure.needs in keys)]


def row_of(metrics: Metrics) -> dict[str, Any]:
    """Returns the values of all columns: those of the JSON answer, without all else that it says."""
    return {figure.name: figure.compute(metrics) for figure in FIGURES.values() if figure.column}


def nest(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nests values by their paths; a number in a path is an index of a list.

    >>> nest([("mfu.palm", 0.5), ("interval_90_s.0", 1.0), ("interval_90_s.1", 1.2)])
    {'mfu': {'palm': 0.5}, 'interval_90_s': [1.0, 1.2]}
    """
    answer: dict[str, Any] = {}
    for path, value in values:
        inner: Any = answer
        *above, last = path.split(".")
        for key, below in pairwise((*above, last)):
            inner = inner.setdefault(key, [] if below.isdigit() else {})
        if last.isdigit():
            inner.append(value)
        else:
            inner[last] = value
    return answer
