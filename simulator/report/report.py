"""The answer: step time with an interval, breakdown, utilisation, memory per stage, and what limits the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from hardware.units import GIB
from simulator.costs.kernels.roofline import peak
from simulator.engine.occupancy import Occupied
from simulator.engine.peak_memory import Peak, over_time, peaks
from simulator.engine.per_rank import Pace, Unfolded, stretch_passes, unfold
from simulator.engine.play import PlayedStep
from simulator.engine.steady_state import Window, window
from simulator.ir.operators import QUANTISED
from simulator.ir.routing import Routing
from simulator.models import flops
from simulator.plan.plan import Plan
from simulator.program.block import SUMS
from simulator.program.categories import COMPUTING, EXPOSED, KINDS
from simulator.program.flatten import flatten
from simulator.program.memory_profile import CATEGORIES
from simulator.program.program import Program
from simulator.report.breakdown import Breakdown, breakdown
from simulator.scheduling.list_scheduler import at_run_time
from simulator.scheduling.schedule import ScheduleItem

COMMUNICATION = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "dp": "data-parallel",
    "pp": "pipeline",
    "copy": "host",
}

SKEW = 0.1
"""Real runs have slow tails: the interval reaches a tenth less far down and a tenth farther up than a symmetric one.

Measured over predicted of 600 published dense runs lies between 0.91 and 1.14 for nine of ten: ln 1.14 is 1.4 times
-ln 0.91; for a known framework on a new cluster 0.88 and 1.17, 1.2 times.
"""

T = TypeVar("T", float, np.ndarray, Breakdown)

Z90 = 1.645
"""Standard deviations of a normal distribution on either side of 90 %."""


@dataclass(frozen=True)
class Forecast:
    """A played step, what it was played from, and the memory of every device."""

    plan: Plan
    step: PlayedStep
    resting: Sequence[dict[str, float]]
    """Bytes of what lives through the whole step on every device, by category."""
    assumed: Sequence[str]
    anew: Callable[[Sequence[Sequence[ScheduleItem]]], Program] | None = None
    """The program of the same step by other orders, where devices decide on these at run time."""

    @cached_property
    def peaks(self) -> list[Peak]:
        """The most memory that is allocated on every device."""
        return peaks(self.program, self.resting)

    def memory(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Allocated memory through the step: moments [s] and bytes by category [moments, categories]."""
        return over_time(self.program, self.step.flat, self.step.times, device, self.resting[device])

    @property
    def program(self) -> Program:
        return self.step.program

    @cached_property
    def window(self) -> Window | None:
        """Of a run without a flush, the part that repeats."""
        table = self.program.timetable
        return window(table, self.step.done, self.plan.shape.m) if table.every else None

    @property
    def seconds(self) -> float:
        """How long a step takes: from an empty to an empty pipe, or, without a flush, from batch to batch."""
        return self.window.seconds if self.window else self.step.span

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over the ops of a step, on every device."""
        return self.step.sums_in(self.window) / (self.window.steps if self.window else 1.0)

    def occupied(self, device: int) -> Occupied:
        """When something ran on a device in a step: on average, where it was cut from a run."""
        found, cut = self.step.occupied(device), self.window
        return {axis: cut.occupied(device, spans) for axis, spans in found.items()} if cut else found


class Report:
    """The forecast of one job. `to_dict` is the answer of ``predict --json``; `play` holds every op with its times.

    usual: the other steps of a period, where `play` is the one in which all happens that does only then; times are the
    mean over a period.
    """

    def __init__(self, play: Forecast, usual: Forecast | None = None) -> None:
        self.play, self.usual = play, usual
        self.job = play.plan.job

    def _mean(self, of: Callable[[Forecast], T]) -> T:
        """The mean of a figure over the steps of a period."""
        share = 1 / self.play.plan.period
        return of(self.play) if self.usual is None else share * of(self.play) + (1 - share) * of(self.usual)

    @cached_property
    def seconds(self) -> float:
        """A step without its constant part."""
        return self._mean(lambda play: play.seconds)

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over the ops of a step, on every device."""
        return self._mean(lambda play: play.sums)

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<Report: {self.job.model.name} on {self.job.cluster.name}, {self.step_time:.4g} s a step, {fits}>"

    @property
    def step_time(self) -> float:
        """Seconds of one training step."""
        return self.seconds + self.job.framework.step_overhead_s

    def first_steps(self, count: int) -> list[float]:
        """Seconds of the first steps of a run, one after another. They are alike, but that without a flush the first
        one fills the pipe."""
        overhead, window = self.job.framework.step_overhead_s, self.play.window
        return [step + overhead for step in (window.first_steps(count) if window else [self.seconds] * count)]

    @cached_property
    def device(self) -> int:
        """The slowest rank class, which the breakdown describes: the pipeline device that computes longest."""
        program = self.play.program
        work = self.sums[:, : len(COMPUTING), 0].sum(axis=1).tolist()
        return max(range(program.devices), key=lambda d: (round(work[d], 9), -d))

    @cached_property
    def breakdown(self) -> Breakdown:
        device = self.device
        return self._mean(lambda one: breakdown(one.program, one.seconds, one.occupied(device), device, one.sums))

    @cached_property
    def spread(self) -> float:
        """Standard deviation of log(measured / predicted) of the step.

        Kernels of one kind err together, so each kind counts with its share of the busy time; the kinds and what the
        framework's habits leave unexplained are independent of each other.
        """
        parts = self.breakdown.parts
        busy = sum(parts[kind] for kind in (*COMPUTING, *EXPOSED))
        sums = zip(KINDS, self.sums[self.device].tolist(), strict=True)
        terms = [
            parts[kind] / busy * weighted / seconds
            for kind, (seconds, weighted, _, _) in sums
            if seconds and parts[kind]
        ]
        framework = self.job.framework
        return math.hypot(framework.spread, framework.spread_experts if self.job.model.moe else 0.0, *terms)

    @property
    def interval_90(self) -> tuple[float, float]:
        """Where nine of ten measured steps should lie [s]."""
        reach = Z90 * self.spread
        return self.step_time * math.exp(-reach * (1 - SKEW)), self.step_time * math.exp(reach * (1 + SKEW))

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        batch = self.job.batch
        assert batch.total is not None and batch.sequence is not None
        return batch.total * batch.sequence

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_time / self.job.cluster.gpus

    def _utilisation(self, flops_per_step: float) -> float:
        framework = self.job.framework
        number = QUANTISED[framework.quantised].dtype if framework.quantised else framework.weights
        peaks = [peak(cluster.gpu, number) for cluster in self.play.plan.clusters]
        return flops_per_step / (self.step_time * self.job.cluster.gpus * float(np.mean(peaks)))

    @property
    def mfu(self) -> dict[str, float]:
        """Model FLOPs at the step's rate over dense peak, that of the linear layers' number format; palm counts full
        attention, causal half of it. Frozen weights need no gradients."""
        model, seq = self.job.model, self.job.batch.sequence or self.job.model.seq
        needed = {name: flops.with_adapters(name, model, seq, self.job.adapters) for name in ("palm", "causal")}
        return {name: self._utilisation(per_token * self.tokens) for name, per_token in needed.items()}

    @cached_property
    def hfu(self) -> float:
        """FLOPs that the GPUs executed, recomputation included, over dense peak."""
        program = self.play.program
        executed = float(self.sums[..., SUMS.index("flops")].sum())
        return self._utilisation(executed * self.job.cluster.gpus / program.devices)

    @cached_property
    def steps(self) -> list[Unfolded]:
        """The steps of all ranks under the job's noise, one by one; none without noise."""
        noise, play = self.job.noise, self.play
        if noise is None:
            return []
        pace = Pace(noise.jitter, noise.stragglers, noise.slow, noise.seed)
        return [self._unlike(play, pace, step) for step in range(noise.steps)]

    def _unlike(self, play: Forecast, pace: Pace, step: int) -> Unfolded:
        """A step under noise; where devices decide at run time, by the paces of their slowest ranks."""
        program, plan, flat = play.program, play.plan, play.step.flat
        if play.anew is not None:
            lasts = stretch_passes(program, plan.mesh, plan.pipeline_axis, pace, step)
            hop = max((send.seconds + send.latency for _, send in program.sent), default=0.0)
            told = program.timetable.orders
            program = play.anew(at_run_time(plan.schedule, plan.shape, told, lasts, hop).order)
            flat = flatten(program)
        return unfold(program, plan.mesh, plan.pipeline_axis, pace, step, flat)

    @property
    def step_times(self) -> list[float]:
        """Seconds of every step under the job's noise."""
        return [step.span + self.job.framework.step_overhead_s for step in self.steps]

    # -------------------------------------------------------------------------------------- memory

    @property
    def capacity(self) -> float:
        """Bytes of one GPU: of the smallest, where stages have several kinds."""
        return min(self.capacities)

    @cached_property
    def capacities(self) -> list[float]:
        """Bytes of a GPU of every device of the pipeline."""
        return [float(cluster.gpu.memory) for cluster in self.play.plan.clusters]

    @property
    def peak_allocated(self) -> float:
        return max(peak.total for peak in self.play.peaks)

    @property
    def peak_reserved(self) -> float:
        """What the allocator holds: allocated and what lies broken between."""
        return self.peak_allocated * self.job.framework.memory.reserved_share

    @property
    def peak_device(self) -> float:
        """What nvidia-smi shows: reserved, the CUDA context and the libraries' own buffers."""
        return self.peak_reserved + self.job.framework.memory.context_gib * GIB

    @property
    def excess(self) -> list[float]:
        """Bytes that every device of the pipeline needs beyond what its GPU has; below zero they are left."""
        framework = self.job.framework.memory
        needed = [peak.total * framework.reserved_share + framework.context_gib * GIB for peak in self.play.peaks]
        return [need - capacity for need, capacity in zip(needed, self.capacities, strict=True)]

    @property
    def fits(self) -> bool:
        return max(self.excess) <= 0

    # --------------------------------------------------------------------------------------- words

    @property
    def costs(self) -> dict[str, float]:
        """Seconds of the step that are no matrix work, by what they were spent on."""
        parts = self.breakdown.parts
        costs = {
            "the pipeline bubble": parts["bubble"],
            "the optimizer": parts["optimizer"],
            "memory-bound kernels": parts["memory_bound"],
            "idling": parts["idle"],
            "the host": parts["host"] + self.job.framework.step_overhead_s,
        }
        return costs | {f"exposed {name} communication": parts[axis] for axis, name in COMMUNICATION.items()}

    @property
    def limits(self) -> str:
        """What limits the plan, in one sentence."""
        if not self.fits:
            worst = max(range(len(self.play.peaks)), key=lambda d: self.excess[d])
            by = self.play.peaks[worst].by
            top = max(by, key=lambda k: by[k])
            missing = self.excess[worst] / GIB
            return f"It does not fit: stage {worst} needs {missing:.1f} GiB more than the GPU has, most of it {top}."
        parts, step, costs = self.breakdown.parts, self.step_time, self.costs
        worst_cost = max(costs, key=lambda k: costs[k])
        matrix = (parts["gemm"] + parts["attention"]) / step
        return (
            f"Matrix work fills {matrix:.0%} of the step; the largest cost beside it is {worst_cost} with "
            f"{costs[worst_cost] / step:.0%}."
        )

    @property
    def warnings(self) -> list[str]:
        """What a careful reader should know about this plan."""
        found = []
        cluster, mesh, plan = self.job.cluster, self.play.plan.mesh, self.play.plan
        for scheme in plan.family("tensor"):
            for axis in scheme.axes:
                span = mesh.size(axis) * mesh.stride(axis)
                if mesh.size(axis) > 1 and span > cluster.scale_up_domain:
                    found.append(f"{axis} = {mesh.size(axis)} leaves the {cluster.scale_up_domain} GPUs of a domain")
        if self.job.model.positions == "learned" and (self.job.batch.sequence or 0) > self.job.model.seq:
            found.append(f"the sequence is longer than the model's {self.job.model.seq} learned positions")
        return found

    @property
    def assumed(self) -> list[str]:
        """What the forecast takes for granted."""
        framework = self.job.framework
        return [
            f"framework {framework.name}: kernels, overlap, buckets and number formats are its defaults",
            f"{framework.step_overhead_s} s a step for data, logging and launch",
            *([f"{self.play.program.host * 1e6:.4g} us of the host to issue an op"] if self.play.program.host else []),
            *(["no flush: steps are of a full pipe, and gradients have no common norm"] if self.play.window else []),
            *([str(Routing())] if self.job.model.moe and not self.play.plan.family("expert") else []),
            *(text for scheme in self.play.plan.schemes for text in scheme.assumes(self.job.model)),
            *([f"slices of {self._slices} tokens, as they take least"] if not self.play.plan.schedule.slices else []),
            *self.play.assumed,
            *self.job.cluster.filled_in,
        ]

    @property
    def _slices(self) -> str:
        """The lengths of the slices of a sequence, in words."""
        runs = [(length, len(list(run))) for length, run in groupby(self.play.plan.slice_lengths)]
        return ", ".join(f"{count} x {length}" if count > 1 else str(length) for length, count in runs)

    def to_dict(self) -> dict[str, Any]:
        """The JSON answer, in seconds and GiB."""
        parts = self.breakdown.parts
        host = parts["host"] + self.job.framework.step_overhead_s
        low, high = self.interval_90
        run = self.job.run
        days = run.tokens / self.tokens * self.step_time / 86400 if run.tokens else None
        hours = days * 24 * self.job.cluster.gpus if days is not None else None
        price = run.price_per_gpu_hour
        return {
            "id": self.job.id,
            "meshcast": product_version(),
            "status": "fits" if self.fits else "does-not-fit",
            "job": self.job.to_dict(),
            "step_time_s": self.step_time,
            "interval_90_s": [low, high],
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "breakdown_s": {
                "compute": {kind: parts[kind] for kind in ("gemm", "attention", "memory_bound")},
                "exposed": {axis: parts[axis] for axis in EXPOSED},
                "bubble": parts["bubble"],
                "optimizer": parts["optimizer"],
                "host": host,
                "idle": parts["idle"],
            },
            "hidden_s": self.breakdown.hidden,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "memory": {
                "capacity_gib": self.capacity / GIB,
                "peak_allocated_gib": self.peak_allocated / GIB,
                "peak_reserved_gib": self.peak_reserved / GIB,
                "peak_device_gib": self.peak_device / GIB,
                "stages": [
                    {
                        "stage": device,
                        "peak_allocated_gib": peak.total / GIB,
                        "by": {category: peak.by.get(category, 0.0) / GIB for category in CATEGORIES},
                    }
                    for device, peak in enumerate(self.play.peaks)
                ],
            },
            "limits": self.limits,
            "assumed": self.assumed,
            "warnings": self.warnings,
            "run": {
                "days": days,
                "gpu_hours": hours,
                "cost": hours * price if hours is not None and price is not None else None,
            },
            **({"noise": self._noise()} if self.steps else {}),
            **({"published": self._published()} if self.job.published else {}),
        }

    def _published(self) -> dict[str, Any]:
        """The published figure of this run, and ours."""
        told, model, seq = self.job.published, self.job.model, self.job.batch.sequence or self.job.model.seq
        assert told is not None
        per_token = flops.with_adapters(told.flops, model, seq, self.job.adapters)
        return told.beside(
            {
                "step_time_s": self.step_time,
                "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
                "tflops_per_gpu": per_token * self.tokens_per_s_per_gpu / 1e12,
                "mfu": self.mfu[told.flops],
            }
        )

    def _noise(self) -> dict[str, Any]:
        """Steps rank by rank: how long they take, and the rank that computes longest, by its number."""
        busy = np.mean([step.busy for step in self.steps], axis=0)
        mesh, pipeline = self.play.plan.mesh, self.play.plan.mesh.parts(self.play.plan.pipeline_axis)
        order = list(mesh.axes)
        # Devices of the pipeline come first in the arrays, wherever their axis stands in the mesh.
        at = order.index(pipeline[0]) if self.play.plan.pipeline_axis else 0
        ranks = np.moveaxis(busy, 0, at) if self.play.plan.pipeline_axis else busy
        times = np.array(self.step_times)
        return {
            "step_times_s": times.tolist(),
            "median_s": float(np.median(times)),
            "p90_s": float(np.quantile(times, 0.9)),
            "over_equal_ranks": float(np.median(times)) / self.step_time,
            "slowest_rank": int(np.argmax(ranks)),
            "its_kernels_s": float(busy.max()),
            "mean_kernels_s": float(busy.mean()),
        }


@cache
def product_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("meshcast")
    except PackageNotFoundError:
        return "0+unknown"
