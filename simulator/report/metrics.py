"""The quantities of a forecast: step time and its interval, throughput, utilisation, memory, length of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from meshcast.hardware.units import GIB
from meshcast.simulator.costs.kernels.roofline import peak
from meshcast.simulator.costs.regimes import KERNELS_OF_A_STEP, Regime, StepResidual, residuals
from meshcast.simulator.costs.step_posterior import NOTHING_LEARNT, StepCorrection
from meshcast.simulator.ir.operators import QUANTISED
from meshcast.simulator.models import flops
from meshcast.simulator.program.block import SUMS
from meshcast.simulator.program.categories import COMPUTING, EXPOSED, HOST, KINDS
from meshcast.simulator.report.breakdown import Breakdown, slowest_device
from meshcast.simulator.report.energy import StepEnergy, step_energy
from meshcast.simulator.report.forecast import Forecast
from meshcast.simulator.report.host_memory import PLACES, HostUse, host_uses
from meshcast.simulator.report.open_effects import open_effects
from meshcast.simulator.report.peak_errors import MemoryFit, peak_error_of
from meshcast.simulator.report.phases import heights_of_devices

T = TypeVar("T", float, np.ndarray, Breakdown)

Z90 = 1.645
"""Standard deviations of a normal distribution on either side of 90 %."""

REGIME = "regime"
"""Name of the residual of the job's regime among the contributions to `Metrics.sigma`."""

LEARNT = "learnt"
"""Name of the residual where measured steps of the same source were learnt from, instead of that of the regime."""

CAUSE = "sigmas."
"""Beginning of the names of the contributions that the job's framework states."""

NAMED = 3
"""Contributions to the width of the interval that a report names."""


def interval_90(step: float, bias: float, sigma: float) -> tuple[float, float]:
    """Returns the 90 % interval of a step [s] whose log(measured / forecast) has this middle and standard deviation."""
    middle, reach = step * math.exp(bias), math.exp(Z90 * sigma)
    return middle / reach, middle * reach


class Metrics:
    """The quantities of a forecast.

    play: the played step, with every op and its times; where steps repeat with a period, that in which everything
        happens that does not happen in each step; of steps that differ, that which needs most memory.
    step_kinds: steps of several kinds, `play` among them, each with its share of all steps; empty if all steps
        are equal. Times are the mean over them.
    correction: what measured steps of the same source say of this one.
    """

    def __init__(self, play: Forecast, step_kinds: Sequence[tuple[float, Forecast]] = ()) -> None:
        self.play, self.step_kinds = play, step_kinds
        self.job = play.plan.job
        self.correction: StepCorrection = NOTHING_LEARNT

    def _mean(self, of: Callable[[Forecast], T]) -> T:
        if not self.step_kinds:
            return of(self.play)
        (share, first), *others = self.step_kinds
        mean = share * of(first)
        for share, play in others:
            mean = mean + share * of(play)
        return mean

    # -------------------------------------------------------------------------------------- time

    @cached_property
    def seconds(self) -> float:
        """Duration of a step without the framework's constant time, as its parts are priced [s]."""
        return self._mean(lambda play: play.seconds)

    @property
    def step_time(self) -> float:
        """Duration of a step [s]: of training, or of the forward passes of a forward-only job."""
        return self.correction.factor * (self.seconds + self.job.framework.step_overhead_s)

    @property
    def times_of_step_kinds(self) -> list[float]:
        """Durations of the steps of a plan whose steps differ [s]."""
        return [
            self.correction.factor * (play.seconds + self.job.framework.step_overhead_s) for _, play in self.step_kinds
        ]

    def first_steps(self, count: int) -> list[float]:
        """Returns the durations of the first `count` steps of a run [s].

        They are equal, except without a flush, where the first step also fills the pipeline, and of a plan whose steps
        differ, which has no more than these.
        """
        overhead, window = self.job.framework.step_overhead_s, self.play.window
        if self.play.plan.passes.steps > 1:
            return self.times_of_step_kinds[:count]
        steps = window.first_steps(count) if window else [self.seconds] * count
        return [self.correction.factor * (step + overhead) for step in steps]

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over the ops of a step, on every device."""
        return self._mean(lambda play: np.sum([part.sums for part in play.parts], axis=0))

    @cached_property
    def device(self) -> int:
        """The pipeline device that computes longest, which the breakdown describes."""
        return slowest_device(self.sums)

    @property
    def breakdown(self) -> Breakdown:
        """Account of the step without the framework's constant time on the slowest device."""
        return self.correction.factor * self._account if self.correction.rows else self._account

    @cached_property
    def _account(self) -> Breakdown:
        """The same as its parts are priced."""
        device = self.device

        def account(play: Forecast) -> Breakdown:
            first, *others = (part.breakdown(device) for part in play.parts)
            return sum(others, first)

        return self._mean(account)

    @property
    def parts(self) -> dict[str, float]:
        """Account of `step_time` on the slowest device [s]: the framework's constant time counts for the host."""
        parts = self.breakdown.parts
        return {**parts, HOST: parts[HOST] + self.correction.factor * self.job.framework.step_overhead_s}

    @property
    def regime(self) -> Regime:
        """How well the program, its source and the GPUs are known."""
        return self.play.regime

    @property
    def residual(self) -> StepResidual:
        """Distribution of log(measured / forecast) of published steps of this regime."""
        return residuals()[self.regime]

    @cached_property
    def sigmas(self) -> dict[str, float]:
        """Contributions to `sigma`: of the regime, of settings that the job leaves open, of causes that the framework
        names, and of every kind of busy time.

        Errors of kernels of a kind are correlated, so a kind counts with its share of the busy time; those of its
        shapes are not, and average out.
        """
        parts = self.breakdown.parts
        busy = sum(parts[kind] for kind in (*COMPUTING, *EXPOSED))
        sums = zip(KINDS, self.sums[self.device].tolist(), strict=True)
        whole = {LEARNT: self.correction.sigma} if self.correction.rows else {REGIME: self.residual.sigma}
        return {
            **whole,
            **{f"{CAUSE}{name}": sigma for name, sigma in {**self._open_effects, **self.job.framework.sigmas}.items()},
            **{
                kind: parts[kind] / busy * weighted / seconds / math.sqrt(KERNELS_OF_A_STEP)
                for kind, (seconds, weighted, _, _) in sums
                if seconds and parts[kind]
            },
        }

    @cached_property
    def _open_effects(self) -> dict[str, float]:
        """Contributions of the settings that the job leaves open."""
        return open_effects(self.job, self.breakdown, self.step_time)

    @property
    def sigma(self) -> float:
        """Standard deviation of log(measured / predicted) of the step: its contributions are independent."""
        return math.hypot(*self.sigmas.values())

    @cached_property
    def interval_90(self) -> tuple[float, float]:
        """Interval that should hold nine of ten measured steps [s]."""
        learnt = self.correction
        bias = learnt.middle - learnt.log_ratio if learnt.rows else self.residual.bias
        return interval_90(self.step_time, bias, self.sigma)

    @property
    def widest(self) -> dict[str, float]:
        """The `NAMED` largest contributions to `sigma`, the largest first."""
        return dict(sorted(self.sigmas.items(), key=lambda item: -item[1])[:NAMED])

    # -------------------------------------------------------------------------------- throughput

    @property
    def tokens(self) -> int:
        """Tokens of a step; padding does not count."""
        batch = self.job.batch
        assert batch.total is not None and batch.sequence is not None
        if not batch.lengths:
            return batch.total * batch.sequence
        return round(sum(tokens for tokens, _ in self._tokens_by_class))

    @property
    def _tokens_by_class(self) -> list[tuple[float, int]]:
        """Tokens of a step without padding, of every class of micro-batches, and those of one of its sequences; of
        steps that differ the mean."""
        return [
            (share * (count * kind.real_tokens), max(1, round(kind.real_tokens / kind.samples)))
            for share, play in self.step_kinds or [(1.0, self.play)]
            for count, kind in zip(play.plan.passes.class_counts, play.plan.job.batch.lengths, strict=True)
        ]

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens / self.step_time / self.job.cluster.gpus

    def flops_per_token(self, convention: str) -> float:
        """Returns the FLOPs of the model for a token by `palm` or `causal`: those of the passes that the job has.

        The pass of a reference counts. Of micro-batches of different lengths the mean over tokens, each in a sequence
        as long as those of its class without padding.
        """
        job, reference = self.job, self.job.train.reference

        def count_flops(seq: int) -> float:
            needed = flops.needed_flops(convention, job.model, seq, job.adapters, job.forward_only)
            return needed + (flops.needed_flops(convention, job.model, seq, forward_only=True) if reference else 0.0)

        if not job.batch.lengths:
            return count_flops(job.batch.sequence or job.model.seq)
        by_class = self._tokens_by_class
        total = sum(tokens for tokens, _ in by_class)
        return sum(tokens / total * count_flops(seq) for tokens, seq in by_class)

    @property
    def linear_format(self) -> str:
        """The number format of the GEMMs of linear layers, by whose peak rate utilization is counted."""
        framework = self.job.framework
        return QUANTISED[framework.quantised].dtype if framework.quantised else framework.weights

    @cached_property
    def peak_flops(self) -> float:
        """Dense peak of a GPU in this format [FLOP/s]; of GPUs of several kinds their mean."""
        cluster = self.job.cluster
        every = [group.node for group in cluster.groups for _ in range(group.nodes)] or [cluster.node]
        rates = [peak(node.gpu, self.linear_format) for node in every]
        return float(np.average(rates, weights=[int(node.gpus) for node in every]))

    def _utilisation(self, flops_per_step: float) -> float:
        """Returns the FLOPs of a step on all GPUs over what they could do in its duration."""
        return flops_per_step / (self.step_time * self.job.cluster.gpus * self.peak_flops)

    @cached_property
    def mfu(self) -> dict[str, float]:
        """Model FLOPs utilization: FLOPs of the model per second over dense peak in the linear layers' number format.

        "palm" counts attention in full, "causal" half of it. Frozen weights need no FLOPs for their gradients, and a
        forward-only job needs a third of all FLOPs.
        """
        return {name: self._utilisation(self.flops_per_token(name) * self.tokens) for name in ("palm", "causal")}

    @cached_property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: executed FLOPs per second, recomputation included, over the same peak."""
        executed = float((self.sums[..., SUMS.index("flops")] * self.play.plan.ranks.device_weights[:, None]).sum())
        if self.job.batch.rounds:
            from meshcast.simulator.plan.unlike_degrees import busy_share

            executed *= self._mean(lambda play: busy_share(play.plan))
        return self._utilisation(executed * self.job.cluster.gpus / len(self.sums))

    # ------------------------------------------------------------------------------------ memory

    @property
    def capacity(self) -> float:
        """Memory of a GPU [bytes]: of the smallest, where stages have several kinds."""
        return min(float(cluster.gpu.memory) for cluster in self.play.plan.ranks.clusters)

    @cached_property
    def usable(self) -> list[float]:
        """Memory of a GPU of every pipeline device that its driver leaves to programs [bytes]."""
        return [cluster.gpu.program_memory for cluster in self.play.plan.ranks.clusters]

    @property
    def peak_allocated(self) -> float:
        """Peak memory allocated by tensors on the fullest device [bytes], in whichever phase of the run."""
        return max(total for total, _ in self._heights)

    @cached_property
    def _heights(self) -> list[tuple[float, float]]:
        """By device the largest memory of tensors, and what the allocator has cached beside it [bytes]."""
        return heights_of_devices(self.play)

    @property
    def peak_reserved(self) -> float:
        """Peak memory reserved by the caching allocator [bytes]: allocated memory, cached blocks and fragmentation."""
        return self.peak_device - self.job.framework.memory.context_gib * GIB

    @property
    def peak_device(self) -> float:
        """Peak memory that nvidia-smi shows [bytes]: reserved memory, the CUDA context and buffers of libraries."""
        return max(self.needs)

    @cached_property
    def needs(self) -> list[float]:
        """Peak memory of a GPU of every pipeline device that nvidia-smi shows [bytes].

        Gradients that are freed and allocated again from step to step leave their places among activations to the
        cache.

        The allocator returns cached blocks to the GPU before it fails (`release_cached_blocks` in PyTorch's
        CUDACachingAllocator.cpp), so cached memory ends with what the GPU leaves to programs.
        """
        memory = self.job.framework.memory
        context = memory.context_gib * GIB
        states = [sum(by.values()) for by in self.play.resting]
        heights = zip(self._heights, states, self.usable, strict=True)
        return [
            max(total + context, min(memory.reserve(total + cached, kept + cached) + context, usable))
            for (total, cached), kept, usable in heights
        ]

    @cached_property
    def excess(self) -> list[float]:
        """Bytes that every pipeline device needs beyond the memory of its GPU; negative where memory stays free."""
        return [need - usable for need, usable in zip(self.needs, self.usable, strict=True)]

    @cached_property
    def host_uses(self) -> list[HostUse]:
        """What the plan offloads to the memory and disks of a node; empty if it offloads nothing."""
        return host_uses(self.play)

    @cached_property
    def missing(self) -> str:
        """The memory that the plan lacks, in words; empty if it fits."""
        if max(self.excess) > 0:
            gpu = self.usable[self.excess.index(max(self.excess))]
            return f"{max(self.excess) / GIB:,.1f} GiB more than the {gpu / GIB:.4g} GiB of a GPU"
        lacking = max(self.host_uses, key=lambda use: use.excess, default=None)
        if lacking is None or lacking.excess <= 0:
            return ""
        capacity = (lacking.capacity or 0.0) / GIB
        what = f"{PLACES[lacking.place]} of a {lacking.node}"
        return f"{lacking.excess / GIB:,.1f} GiB more than the {capacity:,.0f} GiB of {what}"

    @property
    def fits(self) -> bool:
        """Whether the plan fits more likely than not: every GPU, and every host that it offloads to, has what it needs
        by the forecast."""
        return self.fit.room >= 1

    @cached_property
    def fit(self) -> MemoryFit:
        """How the memory of GPUs and hosts compares with what the plan needs."""
        context = self.job.framework.memory.context_gib * GIB
        held = [total + context for total, _ in self._heights]
        rooms = [usable / need for need, usable in zip(held, self.usable, strict=True)]
        room = min(*rooms, *(use.room for use in self.host_uses), math.inf)
        return MemoryFit(max(held), room, peak_error_of(self.job.framework))

    # --------------------------------------------------------------------------------------- run

    @property
    def days(self) -> float | None:
        """Days of the whole training, without interruptions; None if the job does not say how many tokens."""
        tokens = self.job.run.tokens
        return tokens / self.tokens * self.step_time / 86400 if tokens else None

    @property
    def steps_of_run(self) -> float | None:
        """Steps of the whole training; None if the job does not say how many tokens."""
        tokens = self.job.run.tokens
        return tokens / self.tokens if tokens else None

    @property
    def gpu_hours(self) -> float | None:
        return self.days * 24 * self.job.cluster.gpus if self.days is not None else None

    @property
    def cost(self) -> float | None:
        """Price of the whole training, in the currency of the job's `price_per_gpu_hour`."""
        hours, price = self.gpu_hours, self.job.run.price_per_gpu_hour
        return hours * price if hours is not None and price is not None else None

    # ------------------------------------------------------------------------------------ energy

    @cached_property
    def energy(self) -> StepEnergy:
        """Energy of a step; of steps that differ the mean."""
        every = self.step_kinds or [(1.0, self.play)]
        overhead = self.job.framework.step_overhead_s
        parts = [
            (share, step_energy(play, self.correction.factor * (play.seconds + overhead))) for share, play in every
        ]
        joules = sum(share * part.gpu_watts * part.seconds for share, part in parts)
        return replace(parts[0][1], seconds=self.step_time, gpu_watts=joules / self.step_time)

    @property
    def step_kwh_90(self) -> tuple[float, float]:
        """Interval that should hold nine of ten measured energies of a step [kWh]: of its duration and its power."""
        ends = (abs(math.log(end / self.step_time)) for end in self.interval_90)
        below, above = (math.hypot(end, Z90 * self.energy.sigma) for end in ends)
        return self.energy.kwh * math.exp(-below), self.energy.kwh * math.exp(above)

    @property
    def energy_mwh(self) -> float | None:
        """Energy of the whole training, nodes and data centre included [MWh]."""
        steps = self.steps_of_run
        return steps * self.energy.kwh / 1000 if steps is not None else None

    @property
    def co2_t(self) -> float | None:
        """CO2 of that energy [t]; None if the job does not say what a kilowatt-hour emits."""
        energy, carbon = self.energy_mwh, self.job.run.carbon_kg_per_kwh
        return energy * carbon if energy is not None and carbon is not None else None
