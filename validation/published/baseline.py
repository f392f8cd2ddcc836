"""The naive forecast beside every other: one efficiency for a GPU and a number format.

The efficiency is the median, over runs, of the time that the hardware FLOPs take at peak over the measured time; the
step that it forecasts is the time at peak over the efficiency. It knows the work and nothing else. Told from the very
runs it is in-sample, as no forecast is; told from the runs of all other sources it is as blind as a forecast.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import Any

from simulator.models.flops import forward_matmul_flops
from simulator.report.report import Report
from validation.published.summary import measured_step

PEAKS = {"bf16": "bf16", "fp16": "fp16", "nvfp4": "fp4"}
"""Number format whose peak bounds a precision; all kinds of fp8 have one."""

MODULES = {
    "core_attn": ("attention",),
    "attention": ("qkv", "attention", "proj"),
    "mlp": ("mlp",),
    "moe": ("router", "experts", "shared"),
    "shared_experts": ("shared",),
}
"""Parts of the forward pass that a recomputed module repeats."""


def peak_of(precision: str | None) -> str:
    """The number format whose peak bounds a precision."""
    return PEAKS.get(precision or "", "fp8")


def at_peak(report: Report, peak: str) -> float | None:
    """Seconds that the matrix products of a step take on all GPUs at their peak: no step is shorter.

    Recomputation counts, attention is causal, the output layer is in. None for a GPU without this number format.
    """
    rates = {str(name): float(rate) for name, rate in report.job.cluster.gpu.peak.items()}
    return hardware_flops(report) / (report.job.cluster.gpus * rates[peak]) if peak in rates else None


def hardware_flops(report: Report) -> float:
    """FLOPs of the matrix products of a step, all GPUs together."""
    job, plan = report.job, report.play.plan
    parts = forward_matmul_flops(job.model, report.tokens, job.batch.sequence or job.model.seq, causal=True)
    layers = {name: value for name, value in parts.items() if name != "head"}
    again = 0.0
    for scheme in plan.family("memory"):
        if scheme.name == "recompute-full":
            some = job.model.layers if scheme.options.layers is None else scheme.options.layers
            again += sum(layers.values()) * sum(min(some, held) for held in plan.layers) / job.model.layers
        elif scheme.name == "recompute-selective":
            # A fused kernel keeps nothing of the core that would have to be computed again.
            fused = {"core_attn"} if job.framework.attention == "flash" else set()
            modules = set(scheme.options.modules) - fused
            again += sum(layers.get(part, 0) for module in modules for part in MODULES.get(module, ()))
    needed = 3.0 * sum(parts.values()) + again
    if job.adapters:  # frozen weights have no gradients
        needed += 6.0 * job.adapters.parameters(job.model) * report.tokens - sum(parts.values()) + parts["attention"]
    return needed


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Puts the naive forecasts beside the others: ``baseline`` of every answer that has a time and a peak.

    `step_time_s` and `error` are in-sample, `other_sources` is told from all runs but those of the same source: of the
    same GPU and format, else of the format, else of all.
    """
    known = [row for row in rows if row["status"] == "predicted" and row["error"] is not None and row["at_peak_s"]]
    shares = [_share(row) for row in known]
    alike = {key: median(found) for key, found in _grouped(zip(map(_kind, known), shares, strict=True)).items()}
    blind: dict[str, dict[Hashable, float]] = {}
    for source in {row["source"] for row in known}:
        others = [(row, share) for row, share in zip(known, shares, strict=True) if row["source"] != source]
        keyed = ((key, share) for row, share in others for key in (_kind(row), row["peak"], ""))
        blind[source] = {key: median(found) for key, found in _grouped(keyed).items()}
    for row, share in zip(known, shares, strict=True):
        told = blind[row["source"]]
        near = next((told[key] for key in (_kind(row), row["peak"], "") if key in told), None)
        own = alike[_kind(row)]
        row["baseline"] = {
            "step_time_s": row["at_peak_s"] / own,
            "error": share / own - 1,
            "error_from_other_sources": share / near - 1 if near else None,
        }


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    return row["gpu"], row["peak"]


def _share(row: dict[str, Any]) -> float:
    """The share of peak that a run reached."""
    return float(row["at_peak_s"]) / measured_step(row)


def _grouped(pairs: Iterable[tuple[Any, float]]) -> dict[Hashable, list[float]]:
    found = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found
