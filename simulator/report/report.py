"""The report of a forecast: its figures, what limits the plan, warnings and assumptions, and the JSON answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from meshcast.hardware.units import GIB
from meshcast.simulator.costs.stragglers import slowest_pace
from meshcast.simulator.engine.steady_state import window
from meshcast.simulator.ir.routing import Routing
from meshcast.simulator.job.framework import merge_fields
from meshcast.simulator.job.inert_keys import acts, inert_keys
from meshcast.simulator.job.program_rules import BrokenRule, broken_rules
from meshcast.simulator.job.shorthand import leaves_domain
from meshcast.simulator.models.undescribed import name_left_out, name_sample, name_undescribed, name_unsent
from meshcast.simulator.program.flatten import flatten
from meshcast.simulator.program.join import shift_item
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.figures import FIGURES, nest
from meshcast.simulator.report.forecast import Forecast
from meshcast.simulator.report.formatting import (
    describe_device,
    describe_room,
    describe_value,
    format_probability,
    is_heterogeneous,
    name_device,
)
from meshcast.simulator.report.host_memory import loading_use
from meshcast.simulator.report.metrics import Metrics
from meshcast.simulator.report.peak_errors import FITS
from meshcast.simulator.report.phases import find_deciding_phase, list_phases
from meshcast.simulator.report.version import product_version
from meshcast.simulator.scheduling.schedule import ScheduleItem

if TYPE_CHECKING:
    from meshcast.simulator.engine.per_rank import Pace, Unfolded

COMMUNICATION = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "dp": "data-parallel",
    "pp": "pipeline",
    "copy": "host",
}

KEYS = (
    *("id", "meshcast", "status", "job", "step_time_s", "interval_90_s", "tokens_per_s_per_gpu", "breakdown_s"),
    *("hidden_s", "mfu", "hfu", "memory.capacity_gib", "memory", "limits", "assumed", "warnings", "run", "interval"),
    *("parameters", "active_parameters"),
)
"""Keys of the JSON answer in the order that scripts rely on; further keys come after them."""


RANK_LOADS = (
    "where one rank loads it for all (cpu_ram_efficient_loading), set memory.each_rank_loads of the framework: false"
)


class Report(Metrics):
    """The forecast of a job: its metrics, sentences about it, and the answer of ``predict --json`` (`to_dict`)."""

    def __repr__(self) -> str:
        verdict = self.fit.verdict.replace("-", " ")
        return f"<Report: {self.job.model.name} on {self.job.cluster.name}, {self.step_time:.4g} s a step, {verdict}>"

    track: Callable[[Iterable[int]], Iterable[int]] = iter
    """Shows the progress over `steps`."""

    @cached_property
    def steps(self) -> list[Unfolded]:
        """Steps played rank by rank under the job's `noise`; empty without it."""
        noise, play = self.job.noise, self.play
        if noise is None:
            return []
        from meshcast.simulator.engine.per_rank import Pace

        transfers = noise.jitter if noise.communication_jitter is None else noise.communication_jitter
        pace = Pace(noise.jitter, noise.stragglers, noise.slow, noise.seed, transfers, noise.persistent)
        return [self._play_ranks(play, pace, step) for step in self.track(range(noise.steps))]

    def _play_ranks(self, play: Forecast, pace: Pace, step: int) -> Unfolded:
        """Plays a step with kernel times for each rank; a schedule that decides at run time sees the slowest ranks."""
        from meshcast.simulator.engine.per_rank import unfold

        program, plan, flat = play.program, play.plan, play.step.flat
        if play.rebuild is not None:
            program = play.rebuild(_reorder(play, pace, step))
            flat = flatten(program)
        between = bool(plan.passes.update_interval)
        played = unfold(program, plan.ranks.grids, pace, step, flat, ends=between)
        seconds, batches = played.span, 1.0
        if between:
            # Of a run of several batches without a barrier: a step in the steady state.
            ends = played.ends
            seconds = window(program.timetable, lambda action: ends[flat.behind[action] - 1], plan.shape.m).seconds
            batches = program.timetable.shape.m / plan.shape.m
        busy, waited = ([times / batches for times in every] for every in (played.busy, played.waited))
        # The ends of all ops of all steps would fill the memory.
        return replace(played, span=seconds, ends=(), busy=busy, waited=waited)

    @property
    def step_times(self) -> list[float]:
        """Durations of the steps under the job's `noise` [s]."""
        return [self.correction.factor * (step.span + self.job.framework.step_overhead_s) for step in self.steps]

    # --------------------------------------------------------------------------------------- words

    @property
    def spare_memory(self) -> str:
        """The memory that stays free, or that is missing, in words."""
        context = self.job.framework.memory.context_gib * GIB
        spare = -max(self.excess)
        return describe_room(spare, self.peak_allocated, context, min(self.usable)) if self.fits else self.missing

    @property
    def fit_in_words(self) -> str:
        """The verdict on the memory of the plan."""
        likely = format_probability(self.fit.probability)
        words = {
            "fits": f"fits with {likely}",
            "tight": f"tight, it fits with {likely}",
            "does-not-fit": f"does not fit, with {likely} it does",
        }
        return f"{words[self.fit.verdict]}: {self.spare_memory}"

    @property
    def costs(self) -> dict[str, float]:
        """Parts of the step other than GEMMs and attention [s], by their names in `limits`."""
        parts = self.parts
        costs = {
            "the pipeline bubble": parts["bubble"],
            "the optimizer": parts["optimizer"],
            "memory-bound kernels": parts["memory_bound"],
            "idling": parts["idle"],
            "the host": parts["host"],
        }
        return costs | {f"exposed {name} communication": parts[axis] for axis, name in COMMUNICATION.items()}

    @property
    def limits(self) -> str:
        """The lack of memory or the largest cost of the step, in a sentence."""
        if max(self.excess) <= 0 and not self.fits:
            return f"It does not fit: what the plan offloads needs {self.missing}."
        if not self.fits:
            worst = max(range(len(self.play.peaks)), key=lambda d: self.excess[d])
            missing = self.excess[worst] / GIB
            where = name_device(self.play.plan, worst)
            lack = f"It does not fit: {where} needs {missing:.1f} GiB more than the GPU has"
            if not (phase := find_deciding_phase(self.play)).is_step:
                return f"{lack}, in the {phase.name}: {phase.about}."
            by = self.play.peaks[worst].by
            return f"{lack}, most of it {max(by, key=lambda category: by[category])}."
        parts, step, costs = self.breakdown.parts, self.step_time, self.costs
        worst_cost = max(costs, key=lambda k: costs[k])
        matrix = (parts["gemm"] + parts["attention"]) / step
        return (
            f"Matrix work fills {matrix:.0%} of the step; the largest cost beside it is {worst_cost} with "
            f"{costs[worst_cost] / step:.0%}."
        )

    @property
    def warnings(self) -> list[str]:
        """Unusual properties of the plan, and keys of the job without effect, a sentence each."""
        texts = []
        cluster, plan = self.job.cluster, self.play.plan
        for scheme in (scheme for scheme in plan.every_scheme if scheme.family == "tensor"):
            mesh = scheme.mesh
            for axis in scheme.axes:
                span = mesh.size(axis) * mesh.stride(axis)
                if mesh.size(axis) > 1 and span > cluster.scale_up_domain:
                    texts.append(f"{axis} = {mesh.size(axis)} leaves the {cluster.scale_up_domain} GPUs of a domain")
        if self.job.model.positions == "learned" and self.job.batch.longest > self.job.model.seq:
            texts.append(f"the sequence is longer than the model's {self.job.model.seq} learned positions")
        heads = plan.model_parts.model.heads
        if (padding := heads - self.job.model.heads) > 0:
            texts.append(f"{padding} of {heads} heads are padding, whose FLOPs are not in the MFU")
        if (loading := loading_use(self.play)) is not None and loading.excess > 0:
            texts.append(
                f"every rank loads the whole model before weights go to GPUs, which takes {loading}; {RANK_LOADS}"
            )
        return [*texts, *map(str, self.broken_rules), *map(str, inert_keys(self.job))]

    @cached_property
    def broken_rules(self) -> list[BrokenRule]:
        """What the program that the job names refuses of it, or does not have; the forecast stands all the same."""
        return broken_rules(self.job)

    @property
    def assumed(self) -> list[str]:
        """Assumptions of the forecast, a sentence each."""
        framework = self.job.framework
        has_experts = any(scheme.family == "expert" for scheme in self.play.plan.every_scheme)
        return [
            f"framework {framework.name}: kernels, overlap, buckets and number formats are its defaults",
            *self._from_recipes,
            *self._old_attention,
            *self._no_tensor_overlap,
            *self._chosen_keys,
            *self._derived_scans,
            *name_sample(self.job.model, self.job.batch.sequence or self.job.model.seq),
            *name_undescribed(self.job.model),
            *name_left_out(self.job.model),
            *name_unsent(self.job.model, self.play.plan.shape.stages),
            f"{framework.step_overhead_s} s a step for data, logging and launch",
            *([f"{self.play.program.host * 1e6:.4g} us of the host to issue an op"] if self.play.program.host else []),
            *self._slowest,
            *self._groups,
            *([self._without_barrier] if self.play.window else []),
            *([str(Routing())] if self.job.model.moe and not has_experts else []),
            *(text for scheme in self.play.plan.every_scheme for text in scheme.assumptions(self.job.model)),
            *self._chosen_options,
            *([f"slices of {self._slices} tokens, as they take least"] if not self.play.plan.schedule.slices else []),
            *self.play.assumed,
            *(f"not checked: {use}" for use in self.host_uses if use.capacity is None),
            *self.job.cluster.filled_in,
        ]

    @property
    def _from_recipes(self) -> list[str]:
        """What the job takes from the recipes of its program, a sentence for each source."""
        name, by_source = self.job.framework.name, dict[str, list[str]]()
        for key, value, source in self.job.taken:
            if acts(self.job, key):
                by_source.setdefault(source, []).append(f"{key}: {describe_value(value)}")
        return [f"{', '.join(keys)}, as recipes of {name}: {source}" for source, keys in by_source.items()]

    @property
    def _chosen_keys(self) -> list[str]:
        """How kernels of chosen and compressed keys and of several streams are priced, which are not measured."""
        model, chosen = self.job.model, "that of a window"
        how = f"its scores take as long as fused attention of as many FLOPs, and attention to its keys as {chosen}"
        entries = f"attention to compressed entries (model.compressed): takes as long as {chosen} of as many keys, and"
        streams = (
            "residual streams (model.hyper_connections, model.altup): kernels that move them once each way, derived"
        )
        sums = "attention residuals (model.attention_residuals): kernels that read all sums once each way, derived"
        biases = "biases of scores by distance (model.distance_profiles): all of them in memory"
        shapes = (model, *model.variants)
        blocks = (
            f"attention to blocks of keys (model.blocks): takes as long as {chosen} of as many keys, and writes and"
        )
        merged = "reads a result of each block; what scores blocks, as fused attention of as many FLOPs; not measured"
        return [
            *([f"indexer of sparse attention (model.mla.index): {how}"] if model.mla and model.mla.index else []),
            *([f"{entries} an indexer's scores as fused attention; not measured"] if model.compressed else []),
            *([f"{blocks} {merged}"] if any(shape.blocks for shape in shapes) else []),
            *([f"{streams} from residual additions"] if model.streams else []),
            *([f"{sums} from residual additions"] if model.attention_residuals else []),
            *([f"{biases}, written and read apart from attention"] if model.distance_profiles else []),
        ]

    @property
    def _derived_scans(self) -> list[str]:
        """How kernels are priced that go through sequences, where no step with them is published."""
        ssm, linear = self.job.model.ssm, self.job.model.linear_attention
        selective = "selective scans of Mamba-1 (model.ssm.rank): derived from the exponentials and products of fp32"
        triton = (
            "(model.linear_attention): its kernels move bytes as fast as the scans of Mamba-2, which is not measured"
        )
        chunked = {"kimi-delta": "Kimi delta attention", "mlstm": "mLSTM", "rg-lru": "RG-LRU"}
        name = chunked.get(linear.kind) if linear else None
        weighted = "RWKV (model.linear_attention): its kernels are derived as selective scans of Mamba-1 are"
        return [
            *([selective] if ssm and ssm.rank else []),
            *([f"{name} {triton}"] if name else []),
            *([weighted] if linear and linear.kind == "rwkv" else []),
        ]

    @property
    def _old_attention(self) -> list[str]:
        """What is said where a GPU is too old for the fused attention of the framework."""
        gpu, least = self.job.without_flash, self.job.framework.attention_since
        if gpu is None or gpu.compute_capability is None:
            return []
        rule = f"the fused kernels need compute capability {least:.1f}, and {gpu.name} has"
        keep = "framework.set.attention: flash keeps them"
        return [f"unfused attention: {rule} {gpu.compute_capability.value:.1f} ({keep})"]

    @property
    def _no_tensor_overlap(self) -> list[str]:
        """What is said where tensor-parallel ranks do not reach each other, so that nothing of theirs overlaps."""
        domain, plan = self.job.cluster.domain, self.job.plan
        overlaps = any(entry.use == self.job.framework.tensor_overlap for entry in plan.schemes)
        if not self.job.framework.overlap.tp or overlaps or not leaves_domain(plan, domain):
            return []
        return [f"no overlap of tensor parallelism: its ranks are in several scale-up domains of {domain} GPUs"]

    @property
    def _slowest(self) -> list[str]:
        """What is said of the time of GEMMs and attention on the slowest GPU, unless the job has a pace for every
        rank."""
        gpus = self.job.cluster.gpus
        added = 0.0 if self.job.noise else slowest_pace(gpus) - 1.0
        if not added:
            return []
        whose = f"the slowest of {gpus:,} GPUs" if gpus > 1 else "a GPU that waits for no other"
        than = f"{added:.1%} longer" if added > 0 else f"{-added:.1%} less"
        return [f"{whose} takes {than} than the slowest of a node for GEMMs and attention"]

    @property
    def _groups(self) -> list[str]:
        """How ranks in groups of different context-parallel degrees are forecast."""
        batch = self.job.batch
        if not batch.rounds:
            return []
        from meshcast.simulator.plan.unlike_degrees import busy_share, find_degrees

        degrees = ", ".join(map(str, find_degrees(self.play.plan)))
        share, count = busy_share(self.play.plan), len(batch.rounds)
        rounds = f"{count} round{'s' if count > 1 else ''}"
        return [
            f"groups of {degrees} context-parallel ranks in {rounds}: the step is that of ranks in the slowest group "
            f"of each, and all ranks have {share:.0%} of their work",
            "barriers between rounds, and the exchange of samples before the step, take no time",
        ]

    @property
    def _without_barrier(self) -> str:
        """How steps follow each other without a barrier."""
        if self.play.plan.schedule.flush:
            return "no barrier: steps follow each other on every device, and no update is rolled back"
        return "no flush: steps are of a full pipe, and gradients have no common norm"

    @property
    def _chosen_options(self) -> list[str]:
        """Options that the plan leaves to the scheme and that its fastest layer decided."""
        entries = zip(self.job.plan.schemes, self.play.plan.schemes, strict=True)
        options = [
            (scheme.use, key, stated, getattr(scheme.options, key, stated))
            for entry, scheme in entries
            for key, stated in (entry.model_extra or {}).items()
        ]
        return [
            f"{use} with {key} = {value}, whose layers take least"
            for use, key, stated, value in options
            if stated == "auto" != value
        ]

    @property
    def _slices(self) -> str:
        """Lengths of the slices of a sequence, equal neighbours as a single term: "3 x 2048, 1024"."""
        runs = [(length, len(list(run))) for length, run in groupby(self.play.plan.slice_lengths)]
        return ", ".join(f"{count} x {length}" if count > 1 else str(length) for length, count in runs)

    # --------------------------------------------------------------------------------------- JSON

    def state_job(self) -> dict[str, object]:
        """Returns the job in long form, with what it left open as contributions to its interval: it has the same
        forecast."""
        job = self.job.to_dict()
        sigmas = {**self._open_effects, **self.job.framework.sigmas}
        return job | {"framework": merge_fields(job["framework"], {"set": {"sigmas": sigmas} if sigmas else {}})}

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON answer, in seconds and GiB."""
        values = {
            "id": self.job.id,
            "meshcast": product_version(),
            "status": self.fit.verdict,
            "job": self.state_job(),
            **{figure.where: figure.compute(self) for figure in FIGURES.values()},
            "parameters": self.job.model.parameters,
            "active_parameters": self.job.model.active_parameters,
            "hidden_s": self.breakdown.hidden,
            "memory.phases": [
                {"phase": phase.name, "stage": phase.device, "peak_allocated_gib": phase.total / GIB}
                for phase in list_phases(self.play)
            ],
            "memory.stages": self._stages(),
            "memory.interval_90_gib": [
                self.peak_allocated * self.fit.error.ratio(share) / GIB for share in (1 - FITS, FITS)
            ],
            "memory.spread": asdict(self.fit.error),
            "limits": self.limits,
            "interval": {"regime": self.regime, "widest": self.widest},
            "energy.interval_90_kwh": list(self.step_kwh_90),
            "energy.assumed": list(self.energy.assumed),
            "assumed": self.assumed,
            "warnings": self.warnings,
            **({"broken_rules": [rule.to_dict() for rule in self.broken_rules]} if self.broken_rules else {}),
            **({"learnt": self._describe_learnt()} if self.correction.rows else {}),
            **({"noise": self._noise()} if self.steps else {}),
            **({"steps": self._describe_steps()} if self.play.plan.passes.steps > 1 else {}),
            **({"batches": self._describe_batches()} if self.job.drawn else {}),
            **({"published": self._compare_published()} if self.job.published else {}),
        }
        return nest(sorted(values.items(), key=lambda item: _position(item[0])))

    def _describe_learnt(self) -> dict[str, float]:
        """Returns what measured steps of the same source have changed."""
        learnt = self.correction
        return {"steps": learnt.rows, "factor": learnt.factor, "priced_s": self.step_time / learnt.factor}

    def _stages(self) -> list[dict[str, Any]]:
        """Returns the peak memory of every stage, with its parts by category [GiB]; heterogeneous stages have names."""
        plan = self.play.plan
        return [
            {
                "stage": device,
                **({"name": name_device(plan, device)} if is_heterogeneous(plan) else {}),
                **({"ranks": describe_device(plan, device)} if is_heterogeneous(plan) else {}),
                "peak_allocated_gib": peak.total / GIB,
                "by": {category: peak.by.get(category, 0.0) / GIB for category in CATEGORIES},
            }
            for device, peak in enumerate(self.play.peaks)
        ]

    def _compare_published(self) -> dict[str, Any]:
        published = self.job.published
        assert published is not None
        return published.compare(
            {
                "step_time_s": self.step_time,
                "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
                "tflops_per_gpu": self.flops_per_token(published.flops) * self.tokens_per_s_per_gpu / 1e12,
                "mfu": self.mfu[published.flops],
            }
        )

    def _describe_steps(self) -> dict[str, Any]:
        """Returns the durations of steps that differ, in their order."""
        times = self.times_of_step_kinds
        return {"step_times_s": times, "mean_s": self.step_time, "slowest": int(np.argmax(times))}

    def _describe_batches(self) -> dict[str, float | list[float]]:
        """Returns the durations of the steps of the batches that are drawn, in their order, and their distribution."""
        each = len(self.step_kinds) // len(self.job.drawn)
        times = np.array(self.times_of_step_kinds)
        shares = np.array([share for share, _ in self.step_kinds]) * len(self.job.drawn)
        steps = (times * shares).reshape(-1, each).sum(axis=1)
        p5, median, p95 = (float(np.quantile(steps, share)) for share in (0.05, 0.5, 0.95))
        return {"step_times_s": steps.tolist(), "mean_s": self.step_time, "p5_s": p5, "median_s": median, "p95_s": p95}

    def _noise(self) -> dict[str, Any]:
        """Returns statistics of the steps under `noise`, and the rank whose kernels take longest in the mean."""
        busy = np.mean([np.concatenate([grid.ravel() for grid in step.busy]) for step in self.steps], axis=0)
        ranks = np.concatenate([grid.ranks.ravel() for grid in self.play.plan.ranks.grids])
        times = np.array(self.step_times)
        return {
            "step_times_s": times.tolist(),
            "mean_s": float(times.mean()),
            "mean_error_s": float(times.std(ddof=1) / np.sqrt(len(times))) if len(times) > 1 else None,
            "median_s": float(np.median(times)),
            "p90_s": float(np.quantile(times, 0.9)),
            "over_equal_ranks": float(times.mean()) / self.step_time,
            "slowest_rank": int(ranks[busy == busy.max()].min()),
            "its_kernels_s": float(busy.max()),
            "mean_kernels_s": float(busy.mean()),
        }


def _reorder(play: Forecast, pace: Pace, step: int) -> list[Sequence[ScheduleItem]]:
    """Returns the orders of all devices as the passes of a step, on the slowest rank of their stage, make them."""
    from meshcast.simulator.engine.per_rank import stretch_passes
    from meshcast.simulator.scheduling.list_scheduler import reorder_at_run_time

    program, lasts = play.program, stretch_passes(play.program, play.plan.ranks.grids, pace, step)
    hop = max((send.seconds + send.latency for _, send in program.sent), default=0.0)
    new_orders: list[Sequence[ScheduleItem]] = []
    stages = 0
    for part in play.plan.every_pipeline:

        def lasts_here(item: ScheduleItem, stages: int = stages) -> float:
            return lasts(shift_item(item, stages))

        orders = program.timetable.orders[len(new_orders) : len(new_orders) + part.shape.p]
        shifted = [[shift_item(item, -stages) for item in order] for order in orders]
        new_orders += reorder_at_run_time(part.schedule, part.shape, shifted, lasts_here, hop).orders
        stages += part.shape.stages
    return new_orders


@cache
def _position(path: str) -> int:
    """Returns the rank of a path in the order of `KEYS`."""
    places = (number for number, key in enumerate(KEYS) if path == key or path.startswith(f"{key}."))
    return next(places, len(KEYS))
