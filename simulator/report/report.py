"""The answer: step time with an interval, breakdown, utilisation, memory per stage, and what limits the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from hardware.units import GIB
from simulator.costs.kernels.roofline import peak
from simulator.engine.blocks import SUMS
from simulator.engine.kinds import COMPUTING, EXPOSED, KINDS
from simulator.engine.memory import CATEGORIES, Peak, over_time, peaks
from simulator.engine.program import Program
from simulator.engine.step import Step
from simulator.leaves import QUANTISED
from simulator.models import flops
from simulator.plan import Plan
from simulator.report.breakdown import Breakdown, breakdown

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

Z90 = 1.645
"""Standard deviations of a normal distribution on either side of 90 %."""


@dataclass(frozen=True)
class Forecast:
    """A played step, what it was played from, and the memory of every device."""

    plan: Plan
    step: Step
    resting: Sequence[dict[str, float]]
    """Bytes of what lives through the whole step on every device, by category."""
    assumed: Sequence[str]

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


class Report:
    """The forecast of one job. `to_dict` is the answer of ``predict --json``; `play` holds every op with its times."""

    def __init__(self, play: Forecast) -> None:
        self.play = play
        self.job = play.plan.job

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<Report: {self.job.model.name} on {self.job.cluster.name}, {self.step_time:.4g} s a step, {fits}>"

    @property
    def step_time(self) -> float:
        """Seconds of one training step."""
        return self.play.step.span + self.job.framework.step_overhead_s

    @cached_property
    def device(self) -> int:
        """The slowest rank class, which the breakdown describes: the pipeline device that computes longest."""
        program = self.play.program
        work = program.sums[:, : len(COMPUTING), 0].sum(axis=1).tolist()
        return max(range(program.devices), key=lambda d: (round(work[d], 9), -d))

    @cached_property
    def breakdown(self) -> Breakdown:
        return breakdown(self.play.program, self.play.step.span, self.play.step.occupied(self.device), self.device)

    @cached_property
    def spread(self) -> float:
        """Standard deviation of log(measured / predicted) of the step.

        Kernels of one kind err together, so each kind counts with its share of the busy time; the kinds and what the
        framework's habits leave unexplained are independent of each other.
        """
        parts = self.breakdown.parts
        busy = sum(parts[kind] for kind in (*COMPUTING, *EXPOSED))
        sums = zip(KINDS, self.play.program.sums[self.device].tolist(), strict=True)
        terms = [
            parts[kind] / busy * weighted / seconds
            for kind, (seconds, weighted, _, _) in sums
            if seconds and parts[kind]
        ]
        habits = self.job.framework
        return math.hypot(habits.spread, habits.spread_experts if self.job.model.moe else 0.0, *terms)

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
        habits = self.job.framework
        number = QUANTISED[habits.quantised].dtype if habits.quantised else habits.weights
        cluster = self.job.cluster
        return flops_per_step / (self.step_time * cluster.gpus * peak(cluster.gpu, number))

    @property
    def mfu(self) -> dict[str, float]:
        """Model FLOPs at the step's rate over dense peak, that of the linear layers' number format; palm counts full
        attention, causal half of it."""
        model, seq = self.job.model, self.job.batch.sequence or self.job.model.seq
        return {
            "palm": self._utilisation(flops.palm(model, seq) * self.tokens),
            "causal": self._utilisation(flops.causal(model, seq) * self.tokens),
        }

    @cached_property
    def hfu(self) -> float:
        """FLOPs that the GPUs executed, recomputation included, over dense peak."""
        program = self.play.program
        executed = float(program.sums[..., SUMS.index("flops")].sum())
        return self._utilisation(executed * self.job.cluster.gpus / program.devices)

    # -------------------------------------------------------------------------------------- memory

    @property
    def capacity(self) -> float:
        """Bytes of one GPU."""
        return float(self.job.cluster.gpu.memory)

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
    def fits(self) -> bool:
        return self.peak_device <= self.capacity

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
            worst = max(range(len(self.play.peaks)), key=lambda d: self.play.peaks[d].total)
            by = self.play.peaks[worst].by
            top = max(by, key=lambda k: by[k])
            excess = (self.peak_device - self.capacity) / GIB
            return f"It does not fit: stage {worst} needs {excess:.1f} GiB more than the GPU has, most of it {top}."
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
            for axis in scheme.claims:
                span = mesh.size(axis) * mesh.stride(axis)
                if mesh.size(axis) > 1 and span > cluster.scale_up_domain:
                    found.append(f"{axis} = {mesh.size(axis)} leaves the {cluster.scale_up_domain} GPUs of a domain")
        if self.job.model.positions == "learned" and (self.job.batch.sequence or 0) > self.job.model.seq:
            found.append(f"the sequence is longer than the model's {self.job.model.seq} learned positions")
        return found

    @property
    def assumed(self) -> list[str]:
        """What the forecast takes for granted."""
        habits = self.job.framework
        return [
            f"framework {habits.name}: kernels, overlap, buckets and number formats are its defaults",
            f"{habits.step_overhead_s} s a step for data, logging and launch",
            *([f"{self.play.program.host * 1e6:.4g} us of the host to issue an op"] if self.play.program.host else []),
            *(["tokens are spread over the experts evenly"] if self.job.model.moe else []),
            *self.play.assumed,
            *self.job.cluster.filled_in,
        ]

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
        }


@cache
def product_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("meshcast")
    except PackageNotFoundError:
        return "0+unknown"
