"""The baseline of every forecast: an efficiency for each GPU and number format.

The efficiency is the median over runs of (time of the executed FLOPs at peak) / (measured time); the baseline forecast
is the time at peak over this efficiency. Fitted on the compared runs themselves it is in-sample; fitted on the runs of
all other sources it is as blind as a forecast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import Any

from meshcast.simulator.models.flops import forward_matmul_flops
from meshcast.simulator.report.report import Report
from meshcast.validation.published.summary import measured_step

PEAKS = {"bf16": "bf16", "fp16": "fp16", "nvfp4": "fp4"}
"""Number format whose peak rate bounds a precision; all others are variants of fp8."""

MODULES = {
    "core_attn": ("attention",),
    "attention": ("qkv", "attention", "proj"),
    "mlp": ("mlp",),
    "moe": ("router", "experts", "shared"),
    "shared_experts": ("shared",),
}
"""Parts of the forward FLOPs that recomputing a module repeats."""

SAVED = {
    "attention": {"attention": 1.0},
    "qkv": {"qkv": 1.0},
    "proj": {"proj": 1.0},
    "linear": {"qkv": 1.0, "proj": 1.0, "mlp": 1.0},
    "alternate_linear": {"qkv": 0.5, "proj": 0.5, "mlp": 0.5},
}
"""Shares of the parts of the forward FLOPs that are not repeated, by the operators whose results are saved."""


def peak_format(precision: str | None) -> str:
    """Returns the number format whose peak rate bounds a precision."""
    return PEAKS.get(precision or "", "fp8")


def seconds_at_peak(report: Report, peak: str) -> float | None:
    """Returns the lower bound of the step time: seconds of its GEMM and attention FLOPs at the peak of all GPUs.

    Recomputation counts, attention is causal, the output layer is included. None for a GPU without this number format.
    """
    rates = {str(name): float(rate) for name, rate in report.job.cluster.gpu.peak.items()}
    return hardware_flops(report) / (report.job.cluster.gpus * rates[peak]) if peak in rates else None


def hardware_flops(report: Report) -> float:
    """Counts GEMM and attention FLOPs of a step, recomputation included, over all GPUs."""
    job, plan = report.job, report.play.plan
    parts = forward_matmul_flops(job.model, report.tokens, job.batch.sequence or job.model.seq, causal=True)
    layers = {name: value for name, value in parts.items() if name != "head"}
    again = 0.0
    for scheme in plan.family("memory"):
        if scheme.name in ("recompute-full", "recompute-operators"):
            some = job.model.layers if scheme.options.layers is None else scheme.options.layers
            kept = [SAVED.get(word, {}) for word in getattr(scheme.options, "save", ())]
            repeated = {part: 1.0 - max((shares.get(part, 0.0) for shares in kept), default=0.0) for part in layers}
            flops = sum(repeated[part] * value for part, value in layers.items())
            again += flops * sum(min(some, held) for held in plan.layers) / job.model.layers
        elif scheme.name == "recompute-selective":
            # Fused attention saves no scores, so recomputing the core repeats nothing.
            fused = {"core_attn"} if job.framework.attention == "flash" else set()
            modules = set(scheme.options.modules) - fused
            again += sum(layers.get(part, 0) for module in modules for part in MODULES.get(module, ()))
    total = 3.0 * sum(parts.values()) + again
    if job.adapters:  # frozen weights have no gradients
        total += 6.0 * job.adapters.parameters(job.model) * report.tokens - sum(parts.values()) + parts["attention"]
    return total


def add_baselines(rows: Sequence[dict[str, Any]]) -> None:
    """Adds ``baseline`` to every answer that has a measured time and a time at peak.

    `step_time_s` and `error` use the in-sample efficiency. `error_from_other_sources` uses that of the runs of other
    sources: of the same GPU and format, else of the same format, else of all.
    """
    known = [row for row in rows if row["status"] == "predicted" and row["error"] is not None and row["at_peak_s"]]
    efficiencies = [float(row["at_peak_s"]) / measured_step(row) for row in known]  # shares of the peak rate
    in_sample = {
        key: median(shares) for key, shares in _group_values(zip(map(_kind, known), efficiencies, strict=True)).items()
    }
    blind: dict[str, dict[Hashable, float]] = {}
    for source in {row["source"] for row in known}:
        rest = [(row, share) for row, share in zip(known, efficiencies, strict=True) if row["source"] != source]
        keyed = ((key, share) for row, share in rest for key in (_kind(row), row["peak"], ""))
        blind[source] = {key: median(shares) for key, shares in _group_values(keyed).items()}
    for row, efficiency in zip(known, efficiencies, strict=True):
        others = blind[row["source"]]
        nearest = next((others[key] for key in (_kind(row), row["peak"], "") if key in others), None)
        typical = in_sample[_kind(row)]
        row["baseline"] = {
            "step_time_s": row["at_peak_s"] / typical,
            "error": efficiency / typical - 1,
            "error_from_other_sources": efficiency / nearest - 1 if nearest else None,
        }


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["gpu"], row["peak"]


def _group_values(pairs: Iterable[tuple[Any, float]]) -> dict[Hashable, list[float]]:
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups
